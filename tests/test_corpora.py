"""The generated corpus: spelled as num2words and babel spell, held-out values not in training, the same by seed."""

import builtins
import datetime
import random
import re
from collections import Counter
from decimal import Decimal

import pytest
from babel.dates import format_date, format_time
from babel.numbers import format_currency, format_decimal
from num2words import num2words

from vanilla_transformer.corpora import (
    SENTENCES,
    CorpusPart,
    NumbersCorpus,
    Sentence,
    _import_libraries,
    _Writer,
    generate_numbers_corpus,
)


PARTS = ("train", "validation", "test")

UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORD_VALUES = {word: value for value, word in enumerate(UNITS)} | {word: 20 + 10 * i for i, word in enumerate(TENS)}
ORDINAL_STEMS = {
    "first": "one",
    "second": "two",
    "third": "three",
    "fifth": "five",
    "eighth": "eight",
    "ninth": "nine",
    "twelfth": "twelve",
}
MONTHS = (
    [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ],
    [
        "Januar",
        "Februar",
        "März",
        "April",
        "Mai",
        "Juni",
        "Juli",
        "August",
        "September",
        "Oktober",
        "November",
        "Dezember",
    ],
)
NUMBER_WORD = "|".join([*WORD_VALUES, "hundred", "thousand", "and"])


def value_of_words(text: str) -> int:
    """The number that English words spell, cardinal or ordinal."""
    total, group = 0, 0
    for word in re.findall(r"[a-z]+", text):
        word = ORDINAL_STEMS.get(word, word)
        if word.endswith("ieth"):
            word = word[:-4] + "y"
        elif word.endswith("th") and word not in WORD_VALUES:
            word = word[:-2]
        if word == "and":
            continue
        if word == "thousand":
            total, group = total + 1000 * group, 0
        elif word == "hundred":
            group *= 100
        else:
            group += WORD_VALUES[word]
    return total + group


def slot_pattern(slot: str) -> str:
    """An expression that matches the English text of a slot."""
    words = rf"(?:(?:{NUMBER_WORD}|first|second|third|fifth|eighth|ninth|twelfth|[a-z]+th)(?:, |[ -])?)+"
    month, day_year = "|".join(MONTHS[0]), r"\d{1,2}, \d{4}"
    if slot in ("number", "label", "count"):
        return rf"{words}|[\d,]+"
    if slot.startswith("ordinal"):
        return rf"{words}|\d+(?:st|nd|rd|th)"
    if slot == "price":
        return rf"[€$£][\d,]+\.\d\d|{words} (?:euro|dollars?), {words} cents?"
    return {
        "date_long": rf"(?:{month}) {day_year}",
        "date_full": rf"\w+day, (?:{month}) {day_year}",
        "date_full_der": rf"\w+day, (?:{month}) {day_year}",
        "date_short": r"\d+/\d+/\d\d",
        "date_words": rf"the {words} of (?:{month})",
        "date_words_en": rf"the {words} of (?:{month})",
        "time_digits": r"\d+:\d\d[ \u202f][AP]M",
        "time_words": rf"{words} (?:o'clock|minutes? (?:past|to) {words})",
    }[slot]


SENTENCE_PATTERNS = [
    (
        sentence,
        re.compile(
            re.sub(
                r"\\{(\d)\\}",
                lambda match, slots=sentence.slots: f"(?P<slot{match[1]}>{slot_pattern(slots[int(match[1])])})",
                re.escape(sentence.source),
            )
        ),
    )
    for sentence in SENTENCES
]


def parse_sentence(source: str) -> tuple[Sentence, list[str]]:
    """The sentence that a line was made from and the texts in its slots."""
    for sentence, pattern in SENTENCE_PATTERNS:
        if match := pattern.fullmatch(source):
            return sentence, [match[f"slot{i}"] for i in range(len(sentence.slots))]
    raise AssertionError(f"no sentence fits {source!r}")


def value_of(text: str) -> tuple:
    """What an English text stands for: ("number", n), ("day", month, day) or ("time", hour modulo 12, minute)."""
    if match := re.fullmatch(r"(\d+):(\d\d)[ \u202f][AP]M", text):
        return "time", int(match[1]) % 12, int(match[2])
    if text.endswith(" o'clock"):
        return "time", value_of_words(text.removesuffix(" o'clock")) % 12, 0
    if match := re.fullmatch(r"(.+) minutes? (past|to) (.+)", text):
        minute, hour = value_of_words(match[1]), value_of_words(match[3])
        return ("time", hour % 12, minute) if match[2] == "past" else ("time", (hour - 1) % 12, 60 - minute)
    if match := re.fullmatch(r"(\d+)/(\d+)/\d\d", text):
        return "day", int(match[1]), int(match[2])
    if match := re.fullmatch(r"(?:\w+day, )?([A-Z]\w+) (\d+), \d{4}", text):
        return "day", MONTHS[0].index(match[1]) + 1, int(match[2])
    if match := re.fullmatch(r"the (.+) of ([A-Z]\w+)", text):
        return "day", MONTHS[0].index(match[2]) + 1, value_of_words(match[1])
    if match := re.fullmatch(r"[€$£]([\d,]+)\.\d\d", text):
        return "number", int(match[1].replace(",", ""))
    if match := re.fullmatch(r"(.+) (?:euro|dollars?), .+ cents?", text):
        return "number", value_of_words(match[1])
    if match := re.fullmatch(r"([\d,]+)(?:st|nd|rd|th)?", text):
        return "number", int(match[1].replace(",", ""))
    return "number", value_of_words(text)


def values_of(source: str, kind: str) -> list[tuple]:
    return [value_of(text) for text in (parse_sentence(source)[1] if kind == "sentence" else [source])]


@pytest.fixture(scope="module")
def corpus() -> NumbersCorpus:
    return generate_numbers_corpus(train_size=12_000, validation_size=300, test_size=1_000, seed=3)


def lines_of(part: CorpusPart, kind: str) -> list[tuple[str, str]]:
    return [(s, t) for s, t, k in zip(part.sources, part.targets, part.kinds, strict=True) if k == kind]


def all_lines(corpus: NumbersCorpus, kind: str) -> list[tuple[str, str]]:
    return [line for part in PARTS for line in lines_of(getattr(corpus, part), kind)]


def test_parts_have_the_sizes_asked_for_and_no_source_twice(corpus):
    assert [len(getattr(corpus, part)) for part in PARTS] == [12_000, 300, 1_000]
    sources = [source for part in PARTS for source in getattr(corpus, part).sources]
    assert len(set(sources)) == len(sources) == 13_300
    for part in PARTS:
        lines = getattr(corpus, part)
        assert len(lines.sources) == len(lines.targets) == len(lines.kinds)
        assert set(lines.kinds) == {"number", "ordinal", "date", "price", "time", "sentence"}
        assert all(text.strip() == text and text and "\n" not in text for text in lines.sources + lines.targets)


def test_numbers_are_spelled_exactly_as_num2words_spells_them(corpus):
    lines = all_lines(corpus, "number")
    assert len(lines) > 3_000
    for source, target in lines:
        number = value_of_words(source)
        assert (source, target) == (num2words(number, lang="en"), num2words(number, lang="de"))


def test_numbers_of_every_length_occur_in_training_and_in_the_test(corpus):
    for part, least in (("train", 8), ("test", 1)):
        digits = Counter(len(str(value_of_words(source))) for source, _ in lines_of(getattr(corpus, part), "number"))
        assert set(range(2, 7)) <= set(digits)
        assert sum(digits.values()) > 200
        assert all(digits[count] >= least for count in range(2, 7))


def test_every_number_below_a_thousand_is_trained_or_held_out(corpus):
    trained = {value_of_words(source) for source, _ in lines_of(corpus.train, "number")}
    missing = set(range(1000)) - trained
    assert 0 in trained
    assert 60 <= len(missing) <= 180, "about 12 in a hundred are held out"
    assert len({number % 10 for number in missing}) == 10, "held out at random, not by the last digit"


def test_zero_is_never_held_out():
    for seed in range(3):
        corpus = generate_numbers_corpus(
            train_size=1_000, validation_size=0, test_size=0, seed=seed, validation_fraction=0.1, test_fraction=0.4
        )
        assert "zero" in corpus.train.sources


def test_ordinals_are_written_as_num2words_writes_them(corpus):
    seen = Counter()
    for source, target in all_lines(corpus, "ordinal"):
        number = value_of(source)[1]
        form = "ordinal_num" if source[0].isdigit() else "ordinal"
        seen[form] += 1
        assert (source, target) == (num2words(number, lang="en", to=form), num2words(number, lang="de", to=form))
        assert 1 <= number < 10_000
    assert min(seen["ordinal"], seen["ordinal_num"]) > 100


def test_dates_are_written_as_babel_writes_them(corpus):
    seen = Counter()
    for source, target in all_lines(corpus, "date"):
        _, month, day = value_of(source)
        if source.startswith("the "):
            seen["words"] += 1
            assert source == f"the {num2words(day, to='ordinal')} of {MONTHS[0][month - 1]}"
            assert target == f"der {num2words(day, lang='de', to='ordinal')} {MONTHS[1][month - 1]}"
            continue
        year = int(source[-4:]) if "/" not in source else 1950 + (int(source[-2:]) - 50) % 100
        form = "short" if "/" in source else "full" if "day" in source else "long"
        seen[form] += 1
        date = datetime.date(year, month, day)
        assert (source, target) == (format_date(date, form, locale="en"), format_date(date, form, locale="de"))
    assert len(seen) == 4
    assert min(seen.values()) > 50


def test_prices_are_written_as_num2words_and_babel_write_them(corpus):
    symbols = {"€": "EUR", "$": "USD", "£": "GBP"}
    seen = Counter()
    for source, target in all_lines(corpus, "price"):
        if source[0] in symbols:
            currency, amount = symbols[source[0]], Decimal(source[1:].replace(",", ""))
            seen[currency] += 1
            assert source == format_currency(amount, currency, locale="en")
            assert target == format_currency(amount, currency, locale="de")
        else:
            whole, cents = source.rsplit(", ", 1)
            currency = "EUR" if "euro" in whole else "USD"
            seen["words"] += 1
            whole_value = value_of_words(whole.rsplit(" ", 1)[0])
            cents_value = value_of_words(cents.rsplit(" ", 1)[0])
            amount = Decimal(100 * whole_value + cents_value) / 100
            spelled = [
                num2words(amount.quantize(Decimal("0.01")), lang=language, to="currency", currency=currency)
                for language in ("en", "de")
            ]
            assert [source, target] == spelled
    assert len(seen) == 4
    assert min(seen.values()) > 50


def test_times_in_digits_are_written_as_babel_writes_them_with_either_space(corpus):
    spaces = Counter()
    for source, target in all_lines(corpus, "time"):
        if not source[0].isdigit():
            continue
        spaces[source[-3]] += 1
        hour, minute = map(int, target.split(":"))
        assert target == format_time(datetime.time(hour, minute), "short", locale="de")
        english = format_time(datetime.time(hour, minute), "short", locale="en")
        assert source.replace("\u202f", " ") == english.replace("\u202f", " ")
    assert set(spaces) == {" ", "\u202f"}


def test_times_in_words_say_the_same_in_both_languages(corpus):
    number_of = {num2words(number, lang="de"): number for number in range(60)} | {"ein": 1, "eine": 1}
    forms = Counter()
    for source, target in all_lines(corpus, "time"):
        if source[0].isdigit():
            continue
        _, hour, minute = value_of(source)
        if target.endswith(" Uhr"):
            forms["Uhr"] += 1
            assert target != "eins Uhr"
            assert (number_of[target.removesuffix(" Uhr")] % 12, 0) == (hour, minute)
            continue
        german_minute, word, relation, german_hour = target.split(" ")
        forms[relation] += 1
        assert word == ("Minute" if german_minute == "eine" else "Minuten")
        assert german_minute not in ("eins", "ein")
        value = 60 * number_of[german_hour] + {"nach": 1, "vor": -1}[relation] * number_of[german_minute]
        assert value % 720 == 60 * hour + minute
    assert set(forms) == {"Uhr", "nach", "vor"}


@pytest.mark.parametrize(
    "hour, minute, english, german",
    [
        (1, 0, "one o'clock", "ein Uhr"),
        (13, 0, "one o'clock", "ein Uhr"),
        (0, 0, "twelve o'clock", "zwölf Uhr"),
        (12, 1, "one minute past twelve", "eine Minute nach zwölf"),
        (0, 30, "thirty minutes past twelve", "dreißig Minuten nach zwölf"),
        (0, 31, "twenty-nine minutes to one", "neunundzwanzig Minuten vor eins"),
        (23, 59, "one minute to twelve", "eine Minute vor zwölf"),
        (12, 59, "one minute to one", "eine Minute vor eins"),
        (13, 2, "two minutes past one", "zwei Minuten nach eins"),
        (21, 17, "seventeen minutes past nine", "siebzehn Minuten nach neun"),
    ],
)
def test_times_in_words_at_the_edges_of_the_clock(monkeypatch, hour, minute, english, german):
    parts_of = {"number": bytearray(10), "day": bytearray(372), "time": bytearray(720)}
    writer = _Writer(random.Random(0), _import_libraries(), parts_of, 0)
    monkeypatch.setattr(writer, "draw_time", lambda: datetime.time(hour, minute))
    assert writer.time_words() == (english, german)


# The oracle for sentences: how each slot must read in German, from its English text.
def german_of(slot: str, text: str) -> set[str]:
    kind, *value = value_of(text)
    if slot == "price":
        if text[0] in "€$£":
            currency = {"€": "EUR", "$": "USD", "£": "GBP"}[text[0]]
            return {format_currency(Decimal(text[1:].replace(",", "")), currency, locale="de")}
        whole, cents = text.rsplit(", ", 1)
        amount = (
            Decimal(value_of_words(whole.rsplit(" ", 1)[0])) + Decimal(value_of_words(cents.rsplit(" ", 1)[0])) / 100
        )
        currency = "EUR" if "euro" in whole else "USD"
        return {num2words(amount.quantize(Decimal("0.01")), lang="de", to="currency", currency=currency)}
    if kind == "number":
        (number,) = value
        if not slot.startswith("ordinal"):
            return {format_decimal(number, locale="de") if text[0].isdigit() else num2words(number, lang="de")}
        ending = slot.removeprefix("ordinal").removeprefix("_e")
        return {f"{number}." if text[0].isdigit() else num2words(number, lang="de", to="ordinal") + ending}
    if slot == "time_digits":
        hour, minute = value
        hour += 12 * (text[-2:] == "PM")
        return {format_time(datetime.time(hour, minute), "short", locale="de")}
    if slot == "time_words":
        hour, minute = value
        spell = {number: num2words(number, lang="de") for number in range(60)}
        hours = [spell[h] for h in (hour or 12, hour % 12 + 1)]
        if minute == 0:
            return {f"{'ein' if hour == 1 else hours[0]} Uhr"}
        left = 60 - minute
        return {
            f"{'eine Minute' if minute == 1 else spell[minute] + ' Minuten'} nach {hours[0]}",
            f"{'eine Minute' if left == 1 else spell[left] + ' Minuten'} vor {hours[1]}",
        }
    month, day = value
    if slot.startswith("date_words"):
        spelled = num2words(day, lang="de", to="ordinal")
        return {
            f"{spelled}n {MONTHS[1][month - 1]}" if slot.endswith("_en") else f"der {spelled} {MONTHS[1][month - 1]}"
        }
    year = 1950 + (int(text[-2:]) - 50) % 100 if slot == "date_short" else int(text[-4:])
    date = datetime.date(year, month, day)
    weekday = ["Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"][date.weekday()]
    long = f"{day}. {MONTHS[1][month - 1]} {year}"
    return {
        {
            "date_long": long,
            "date_full": f"{weekday}, {long}",
            "date_full_der": f"{weekday}, der {long}",
            "date_short": f"{day:02}.{month:02}.{year % 100:02}",
        }[slot]
    }


def test_every_sentence_occurs_and_its_german_has_the_right_form_of_the_same_values(corpus):
    seen = Counter()
    for source, target in all_lines(corpus, "sentence"):
        sentence, texts = parse_sentence(source)
        seen[sentence] += 1
        expected = {sentence.target}
        for i, (slot, text) in enumerate(zip(sentence.slots, texts, strict=True)):
            expected = {line.replace(f"{{{i}}}", german) for line in expected for german in german_of(slot, text)}
        assert target in expected
    assert set(seen) == set(SENTENCES)
    assert min(seen.values()) > 20


def test_sentences_avoid_numbers_that_german_would_inflect(corpus):
    for source, target in all_lines(corpus, "sentence"):
        sentence, texts = parse_sentence(source)
        for slot, text in zip(sentence.slots, texts, strict=True):
            if slot == "count":
                assert value_of(text)[1] % 100 != 1
                assert value_of(text)[1] > 1
        assert not re.search(r"\bein (Euro|Dollar|Cent)\b", target), "the accusative is 'einen'"


# Read as German, with each ending checked by its case and gender: whoever changes a sentence reads it again, here too.
READ_SENTENCES = [
    ("The number is {0}.", "Die Zahl lautet {0}."),
    ("The answer is not {0}.", "Die Antwort ist nicht {0}."),
    ("Is {0} an even number?", "Ist {0} eine gerade Zahl?"),
    ("Please open page {0}.", "Bitte schlagen Sie Seite {0} auf."),
    ("We are in room {0}.", "Wir sind in Raum {0}."),
    ("Bus number {0} is late today.", "Der Bus Nummer {0} hat heute Verspätung."),
    ("There are {0} books in the library.", "In der Bibliothek gibt es {0} Bücher."),
    ("The town has {0} inhabitants.", "Die Stadt hat {0} Einwohner."),
    ("They have sold {0} tickets.", "Sie haben {0} Karten verkauft."),
    ("The factory builds {0} bicycles a year.", "Die Fabrik baut {0} Fahrräder im Jahr."),
    ("I have walked {0} steps today.", "Ich bin heute {0} Schritte gegangen."),
    ("This is the {0} letter.", "Das ist der {0} Brief."),
    ("The {0} visitor gets a present.", "Der {0} Besucher bekommt ein Geschenk."),
    ("She won the {0} round.", "Sie hat die {0} Runde gewonnen."),
    ("Today we are opening our {0} shop.", "Heute eröffnen wir unser {0} Geschäft."),
    ("It rained on the {0} day.", "Am {0} Tag hat es geregnet."),
    ("He finished in {0} place.", "Er belegte den {0} Platz."),
    ("The word is in the {0} line.", "Das Wort steht in der {0} Zeile."),
    ("The meeting is on {0}.", "Das Treffen ist am {0}."),
    ("School starts on {0}.", "Die Schule beginnt am {0}."),
    ("Please answer by {0}.", "Bitte antworten Sie bis zum {0}."),
    ("Date: {0}", "Datum: {0}"),
    ("Today is {0}.", "Heute ist {0}."),
    ("The letter is dated {0}.", "Der Brief trägt das Datum {0}."),
    ("Tomorrow is {0}.", "Morgen ist {0}."),
    ("Her birthday is on {0}.", "Ihr Geburtstag ist am {0}."),
    ("The shop is closed on {0}.", "Das Geschäft ist am {0} geschlossen."),
    ("The ticket costs {0}.", "Die Fahrkarte kostet {0}."),
    ("She paid {0} for the bicycle.", "Sie hat {0} für das Fahrrad bezahlt."),
    ("The bill comes to {0}.", "Die Rechnung beläuft sich auf {0}."),
    ("Can you lend me {0}?", "Kannst du mir {0} leihen?"),
    ("The meeting starts at {0}.", "Die Sitzung beginnt um {0} Uhr."),
    ("The train leaves at {0}.", "Der Zug fährt um {0} Uhr ab."),
    ("The shop opens at {0}.", "Das Geschäft öffnet um {0} Uhr."),
    ("Please wake me at {0}.", "Bitte wecken Sie mich um {0} Uhr."),
    ("It is {0}.", "Es ist {0}."),
    ("The film starts at {0}.", "Der Film beginnt um {0}."),
    ("The concert is on {0} at {1}.", "Das Konzert findet am {0} um {1} Uhr statt."),
    ("The museum had {0} visitors on {1}.", "Am {1} hatte das Museum {0} Besucher."),
    ("The ticket cost {0} on {1}.", "Am {1} kostete die Fahrkarte {0}."),
]


def test_sentences_are_those_that_were_read_for_their_grammar():
    assert [(sentence.source, sentence.target) for sentence in SENTENCES] == READ_SENTENCES


def test_no_two_sentences_share_their_english_text():
    assert len({sentence.source for sentence in SENTENCES}) == len(SENTENCES) >= 12
    for sentence in SENTENCES:
        places = [f"{{{i}}}" for i in range(len(sentence.slots))]
        assert sorted(re.findall(r"{\d}", sentence.source)) == places
        assert sorted(re.findall(r"{\d}", sentence.target)) == places


def test_held_out_values_occur_nowhere_else(corpus):
    values = {
        part: {
            value
            for source, kind in zip(getattr(corpus, part).sources, getattr(corpus, part).kinds, strict=True)
            for value in values_of(source, kind)
        }
        for part in PARTS
    }
    assert all({value[0] for value in values[part]} == {"number", "day", "time"} for part in PARTS)
    assert not values["train"] & values["test"]
    assert not values["train"] & values["validation"]
    assert not values["validation"] & values["test"]
    held_out_numbers = [value[1] for value in values["test"] if value[0] == "number"]
    last_digits = Counter(number % 10 for number in held_out_numbers)
    assert max(last_digits.values()) < 2 * min(last_digits.values())


def test_same_seed_same_corpus_and_other_seed_another():
    sizes = {"train_size": 1_500, "validation_size": 20, "test_size": 50}
    first, again = (generate_numbers_corpus(seed=7, **sizes) for _ in range(2))
    assert first == again
    assert set(generate_numbers_corpus(seed=8, **sizes).test.sources) != set(first.test.sources)


def test_the_held_out_lines_do_not_depend_on_how_much_is_trained():
    small, large = (
        generate_numbers_corpus(train_size=size, validation_size=20, test_size=50) for size in (1_000, 1_500)
    )
    assert small.test == large.test
    assert small.validation == large.validation


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"train_size": 999}, "train_size must be at least 1000, got 999"),
        ({"test_size": -1}, "test_size must be at least 0, got -1"),
        ({"test_fraction": 0.0}, "test_fraction must lie between 0 and 1"),
        ({"validation_fraction": 1.5}, "validation_fraction must lie between 0 and 1"),
        ({"validation_fraction": 0.3, "test_fraction": 0.3}, "at least half"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        generate_numbers_corpus(**arguments)


@pytest.mark.parametrize("missing", ["num2words", "babel.dates"])
def test_missing_library_names_the_extra(monkeypatch, missing):
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == missing:
            raise ImportError(f"No module named '{name}'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=re.escape('pip install "vanilla-transformer[demo]"')):
        generate_numbers_corpus(train_size=1_000, validation_size=0, test_size=0)
