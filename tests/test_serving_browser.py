"""The page of `serve` in Chromium: typed, clicked, uploaded and read as a user does, by two of them at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from translators import varied_model
from vanilla_transformer.translation import translate_lines


webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("gradio")
from selenium.common.exceptions import WebDriverException  # noqa: E402


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="there is no chromium or no chromedriver here"),
]

SECONDS = 300  # for a busy machine
# Where to leave pictures of the page for a person to look at.
PICTURES = os.environ.get("VANILLA_TRANSFORMER_PICTURES")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1300,1700"),
)
SENTENCES = ["The red train leaves at seven.", "", "Where is the old bridge?"]
HOSTILE = "<img src=x onerror=document.title='hit'> </script> ${document.title='hit'} {{7*6}} \u05e9\u05dc\u05d5\u05dd"


class Models:
    """Two models in folders, and what they answer."""

    def __init__(self, tokenizer: Any, folder: Path):
        self.tokenizer = tokenizer
        self.opened = {}
        for name, seed in (("first", 4), ("second", 5)):
            model = self.opened[name] = varied_model(tokenizer, seed=seed)
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        (folder / "first" / "training_run.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
        self.folders = [str(folder / name) for name in self.opened]

    def answers(self, name: str, lines: list[str], n_best: int = 1) -> list[list[str]]:
        """Texts of each line, best first."""
        arguments = {"num_beams": 4, "num_return_sequences": n_best}
        found = translate_lines(self.opened[name], self.tokenizer, lines, **arguments)
        return [[each.text for each in ranked] for ranked in found]


@pytest.fixture(scope="module")
def models(tiny_tokenizer, tmp_path_factory) -> Models:
    return Models(tiny_tokenizer, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def address(models, tmp_path_factory) -> Iterator[str]:
    """The page, served by the command."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "serve"
    source = str(Path(__file__).parents[1] / "src")
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vanilla_transformer_cli",
                "serve",
                "--model",
                *models.folders,
                "--port",
                str(port),
            ],
            env={**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(lambda: "listening at" in log.read_text() or process.poll() is not None, "the page's start")
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}/"
        process.terminate()
        assert process.wait(SECONDS) == 143, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The condition's first value that is true."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except WebDriverException:  # an element that is just being replaced
            pass
        time.sleep(0.2)
    raise AssertionError(f"waited in vain for {what}")


def wait_until_equal(found: Callable[[], Any], expected: Any, what: str) -> None:
    """A page shows its parts one after the other, some of them faded in: nothing of it is compared only once."""
    last = None

    def compare() -> bool:
        nonlocal last
        last = found()
        return last == expected

    try:
        wait_for(compare, what)
    except AssertionError:
        assert last == expected, what
        raise


class User:
    """One browser with the page open."""

    def __init__(self, address: str, folder: Path):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        service = webdriver.ChromeService(DRIVER)
        self.browser = webdriver.Chrome(options=options, service=service)
        self.browser.set_page_load_timeout(SECONDS)
        self.browser.get(address)
        wait_for(lambda: self.all("#source textarea"), "the page")

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return wait_for(lambda: self.all(selector), selector)[0]

    def click(self, selector: str) -> None:
        self.browser.execute_script("arguments[0].click()", self.one(selector))

    def tab(self, name: str) -> None:
        def press() -> bool:
            (tab,) = [each for each in self.all("button[role=tab]") if each.text.strip() == name]
            tab.click()
            return True

        wait_for(press, f"the tab {name}")

    def choose(self, selector: str, labels: list[str], index: int) -> None:
        """Opens a list, which shows these labels (up to a colon), and takes one of them."""
        wait_for(lambda: self.one(selector).click() or True, selector)

        def shown() -> list[str]:
            return [each.text.split(":")[0].removeprefix("✓").strip() for each in self.all("[role=option]")]

        wait_until_equal(shown, labels, f"the list of {selector}")
        wait_for(lambda: self.all("[role=option]")[index].click() or True, labels[index])
        wait_for(lambda: not self.all("[role=option]"), "the list's end")

    def fill(self, selector: str, text: str) -> None:
        """As if typed, whatever its characters."""
        self.browser.execute_script(
            "const e = arguments[0]; e.value = arguments[1]; e.dispatchEvent(new Event('input', {bubbles: true}));"
            "e.dispatchEvent(new Event('change', {bubbles: true})); e.dispatchEvent(new Event('blur'))",
            self.one(selector),
            text,
        )

    def value(self, selector: str) -> str:
        return self.one(selector).get_property("value")

    def table(self) -> list[list[str]]:
        rows = self.all("#table [role=row]")
        cells = [[cell.text.strip() for cell in row.find_elements("css selector", "[role=gridcell]")] for row in rows]
        return [row for row in cells if row]

    def attention(self) -> str:
        """What the frame holds."""
        return self.one("#attention iframe").get_attribute("srcdoc")

    def lines_of_attention(self) -> list[float]:
        """Widths of the lines between tokens in the frame."""
        self.browser.switch_to.frame(self.one("#attention iframe"))
        try:
            return [float(each.get_attribute("x2")) for each in self.all("#lines line")]
        finally:
            self.browser.switch_to.default_content()

    def error(self) -> str:
        """The text of the message that is shown, which is then closed."""
        text = wait_for(lambda: [each.text for each in self.all(".toast-body") if each.text.strip()], "a message")[-1]
        for button in self.all(".toast-close"):
            self.browser.execute_script("arguments[0].click()", button)
        wait_for(lambda: not self.all(".toast-body"), "the message's end")
        return text

    def hosts(self) -> set[str]:
        """What the page asked for, but for what it had in itself."""
        found = set()
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                parameters = message["params"]
                if parameters["documentURL"].startswith("http"):  # not the browser's own first page
                    found.add(parameters["request"]["url"])
        return {url for url in found if not url.startswith(("data:", "blob:"))}

    def picture(self, name: str) -> None:
        if PICTURES:
            self.browser.save_screenshot(os.path.join(PICTURES, f"{name}.png"))


@pytest.fixture(scope="module")
def user(address, tmp_path_factory) -> Iterator[User]:
    found = User(address, tmp_path_factory.mktemp("chromium"))
    yield found
    found.browser.quit()


def test_text_in_translations_scores_and_attention_out_and_nothing_asked_of_others(user, models, address):
    user.picture("start")
    user.one("#source textarea").send_keys("\n".join(SENTENCES))
    user.fill("#n_best input[type=number]", "2")
    user.click("#translate")
    expected = models.answers("first", SENTENCES, 2)
    best = "\n".join(ranked[0] for ranked in expected)
    wait_for(lambda: user.value("#target textarea") == best, "the translation")
    ranks = [(line, rank) for line in (1, 3) for rank in (1, 2)]
    wait_until_equal(
        lambda: [(row[0], row[1], row[5]) for row in user.table()],
        [(str(line), str(rank), " ".join(expected[line - 1][rank - 1].split())) for line, rank in ranks],
        "the table",
    )
    assert all(float(row[2]) < 0 and float(row[3]) < 0 and int(row[4]) > 0 for row in user.table())
    attention = user.attention()
    user.picture("translated")
    user.choose("#line input", [f"line {line}, rank {rank}" for line, rank in ranks], 2)
    wait_for(lambda: user.attention() != attention, "the attention of another line")
    wait_for(lambda: min(user.lines_of_attention(), default=0) > 50, "lines between its tokens")
    user.picture("attention")
    asked = user.hosts()
    assert any(url.startswith(address) for url in asked)
    assert {url for url in asked if not url.startswith(address)} == set()


def test_what_cannot_be_translated_is_told_on_the_page(user, tmp_path):
    user.fill("#source textarea", " \n ")
    user.click("#translate")
    assert "nothing to translate" in user.error()
    # and nothing of an earlier text beside it
    wait_until_equal(lambda: user.value("#target textarea"), "", "no translation")
    wait_until_equal(lambda: user.all("#attention iframe"), [], "no attention")
    wait_until_equal(lambda: [each for row in user.table() for each in row if each], [], "no table")
    user.fill("#source textarea", "word " * 1500)
    user.click("#translate")
    assert "more than the 1,024 that this model takes" in user.error()
    user.fill("#source textarea", "a")
    user.fill("#n_best input[type=number]", "9")
    user.click("#translate")
    user.picture("refused")
    assert "9 translations of a line need as many beams" in user.error()
    user.fill("#n_best input[type=number]", "1")
    user.tab("File")
    user.click("#translate_file")
    assert "There is no file" in user.error()
    bad = tmp_path / "<b>bad.txt"
    bad.write_bytes(b"good\nbad \xff\n")
    user.one("#given input[type=file]").send_keys(str(bad))
    wait_for(lambda: "bad" in user.one("#given").text, "the upload")
    user.click("#translate_file")
    user.picture("refused_file")
    told = user.error()
    assert "bad.txt, line 2: expected UTF-8 text" in told
    assert str(tmp_path) not in told
    user.tab("Text")


def test_hostile_text_stays_text(user):
    user.fill("#source textarea", HOSTILE)
    before = user.value("#target textarea")
    user.click("#translate")
    wait_for(lambda: user.value("#target textarea") != before, "the translation")
    user.one("#attention iframe")
    user.picture("hostile")
    time.sleep(2)
    assert user.browser.title == "vanilla-transformer"
    assert user.all("img[src=x]") == []


def test_an_example_fills_the_box_and_another_model_answers_otherwise(user, models):
    def example() -> list[Any]:
        return [each for each in user.all("button, td") if each.text.strip() == "Two dogs are playing in the snow."]

    wait_for(lambda: len(example()) == 1 and (example()[0].click() or True), "the list of examples")
    wait_for(lambda: user.value("#source textarea") == "Two dogs are playing in the snow.", "the example")
    user.choose("#model input", ["first (en to de)", "second"], 1)
    user.click("#translate")
    ((expected,),) = models.answers("second", ["Two dogs are playing in the snow."])
    wait_for(lambda: user.value("#target textarea") == expected, "the second model's translation")


def test_two_users_at_once_each_get_their_own(user, address, models, tmp_path):
    lines = [f"{number} apples" if number % 5 else "" for number in range(400)]
    given = tmp_path / "apples.txt"
    given.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    other = User(address, tmp_path / "chromium")
    try:
        other.tab("File")
        other.one("#given input[type=file]").send_keys(str(given))
        wait_for(lambda: "apples" in other.one("#given").text, "the upload")
        other.click("#translate_file")
        user.fill("#source textarea", "We bought three pears.")
        user.click("#translate")
        wait_for(lambda: "lines" in other.value("#state textarea, #state input"), "progress")
        other.picture("file_progress")
        ((expected,),) = models.answers("second", ["We bought three pears."])
        wait_for(lambda: user.value("#target textarea") == expected, "the first user's translation")
        link = wait_for(lambda: other.all("#result a[href*=translated]"), "the file")[0].get_attribute("href")
        other.picture("file")
        with urllib.request.urlopen(link) as answer:
            found = answer.read().decode("utf-8").split("\n")
        assert found.pop() == ""
        assert found == [best for best, *_ in models.answers("first", lines)]
        wait_for(lambda: other.value("#state textarea, #state input").startswith("400 lines in "), "the end's line")
        other.click("#translate_file")
        wait_for(lambda: "of 400 lines" in other.value("#state textarea, #state input"), "progress")
        (tmp_path / "pears.txt").write_text("one pear\n", encoding="utf-8")
        other.one("#given button[aria-label=Clear], #given button[aria-label='Remove file']").click()
        other.one("#given input[type=file]").send_keys(str(tmp_path / "pears.txt"))
        wait_for(lambda: "pears" in other.one("#given").text, "the upload")
        wait_for(lambda: other.value("#state textarea, #state input") == "", "the end of the first file's work")
        other.click("#translate_file")
        wait_for(lambda: other.value("#state textarea, #state input").startswith("1 line in "), "the second file")
    finally:
        other.browser.quit()
