"""A parallel corpus, English to German, that is generated instead of downloaded.

Numbers, ordinals, dates, prices and times of day, as `num2words` and `babel` write them in both languages, alone on a
line and in short sentences of our own. The rules behind it are known exactly, so a translation is right or wrong
and a model that has learnt the rules can be told from one that has learnt the lines by heart.

What counts as one value, and so is either in training or held out:

- a whole number from 0 to 999,999, whether it stands as a cardinal, as an ordinal, in words, in digits, in a sentence
  or as the whole part of a price;
- a day of the year (month and day), whatever the year and the way of writing it;
- a time on the clock face (hour modulo 12 and minute), whether before or after noon.

Cents, years, and the single parts of a day or a time are not values of their own: a model could not know what
"17 March" is without having seen any 17. Zero is always in training, because its word occurs in no other number.
"""

from __future__ import annotations

import datetime
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace


__all__ = ["NUMBER_LIMIT", "SENTENCES", "CorpusPart", "NumbersCorpus", "Sentence", "generate_numbers_corpus"]

NUMBER_LIMIT = 1_000_000
"""Whole numbers run from 0 to one less than this."""

ORDINAL_LIMIT = 10_000
WHOLE_PRICE_LIMIT = 10_000

_TRAINING, _VALIDATION, _TEST = 0, 1, 2

# How often a number of one to six digits is drawn: longer numbers are more numerous and harder.
_DIGIT_WEIGHTS = (2, 6, 16, 20, 26, 30)

_KIND_WEIGHTS = {"number": 30, "ordinal": 8, "date": 10, "price": 12, "time": 4, "sentence": 36}

_NARROW_NO_BREAK_SPACE = "\u202f"


@dataclass(frozen=True)
class Sentence:
    """A sentence in two languages with places for values.

    Attributes:
        slots: what stands at `{0}`, `{1}` ... of both texts; each the name of one kind of value (see `_Writer`).
        source: the English text.
        target: the German text.
    """

    slots: tuple[str, ...]
    source: str
    target: str


def _sentences(*slots: str, pairs: Sequence[tuple[str, str]]) -> tuple[Sentence, ...]:
    return tuple(Sentence(slots, source, target) for source, target in pairs)


# German inflects: an ordinal ends in -e after "der" and "die" where they are nominative or feminine accusative, in -en
# after "am", "den" and the dative "der", in -es after "unser" before a neuter noun; a count stands before a plural
# without an article; a price after "kosten", "bezahlen", "leihen" and "auf" is an accusative.
SENTENCES: tuple[Sentence, ...] = (
    *_sentences(
        "number",
        pairs=[
            ("The number is {0}.", "Die Zahl lautet {0}."),
            ("The answer is not {0}.", "Die Antwort ist nicht {0}."),
            ("Is {0} an even number?", "Ist {0} eine gerade Zahl?"),
        ],
    ),
    *_sentences(
        "label",
        pairs=[
            ("Please open page {0}.", "Bitte schlagen Sie Seite {0} auf."),
            ("We are in room {0}.", "Wir sind in Raum {0}."),
            ("Bus number {0} is late today.", "Der Bus Nummer {0} hat heute Verspätung."),
        ],
    ),
    *_sentences(
        "count",
        pairs=[
            ("There are {0} books in the library.", "In der Bibliothek gibt es {0} Bücher."),
            ("The town has {0} inhabitants.", "Die Stadt hat {0} Einwohner."),
            ("They have sold {0} tickets.", "Sie haben {0} Karten verkauft."),
            ("The factory builds {0} bicycles a year.", "Die Fabrik baut {0} Fahrräder im Jahr."),
            ("I have walked {0} steps today.", "Ich bin heute {0} Schritte gegangen."),
        ],
    ),
    *_sentences(
        "ordinal",
        pairs=[
            ("This is the {0} letter.", "Das ist der {0} Brief."),
            ("The {0} visitor gets a present.", "Der {0} Besucher bekommt ein Geschenk."),
            ("She won the {0} round.", "Sie hat die {0} Runde gewonnen."),
        ],
    ),
    *_sentences(
        "ordinal_es", pairs=[("Today we are opening our {0} shop.", "Heute eröffnen wir unser {0} Geschäft.")]
    ),
    *_sentences(
        "ordinal_en",
        pairs=[
            ("It rained on the {0} day.", "Am {0} Tag hat es geregnet."),
            ("He finished in {0} place.", "Er belegte den {0} Platz."),
            ("The word is in the {0} line.", "Das Wort steht in der {0} Zeile."),
        ],
    ),
    *_sentences(
        "date_long",
        pairs=[
            ("The meeting is on {0}.", "Das Treffen ist am {0}."),
            ("School starts on {0}.", "Die Schule beginnt am {0}."),
            ("Please answer by {0}.", "Bitte antworten Sie bis zum {0}."),
        ],
    ),
    *_sentences("date_full", pairs=[("Date: {0}", "Datum: {0}")]),
    *_sentences("date_full_der", pairs=[("Today is {0}.", "Heute ist {0}.")]),
    *_sentences("date_short", pairs=[("The letter is dated {0}.", "Der Brief trägt das Datum {0}.")]),
    *_sentences("date_words", pairs=[("Tomorrow is {0}.", "Morgen ist {0}.")]),
    *_sentences(
        "date_words_en",
        pairs=[
            ("Her birthday is on {0}.", "Ihr Geburtstag ist am {0}."),
            ("The shop is closed on {0}.", "Das Geschäft ist am {0} geschlossen."),
        ],
    ),
    *_sentences(
        "price",
        pairs=[
            ("The ticket costs {0}.", "Die Fahrkarte kostet {0}."),
            ("She paid {0} for the bicycle.", "Sie hat {0} für das Fahrrad bezahlt."),
            ("The bill comes to {0}.", "Die Rechnung beläuft sich auf {0}."),
            ("Can you lend me {0}?", "Kannst du mir {0} leihen?"),
        ],
    ),
    *_sentences(
        "time_digits",
        pairs=[
            ("The meeting starts at {0}.", "Die Sitzung beginnt um {0} Uhr."),
            ("The train leaves at {0}.", "Der Zug fährt um {0} Uhr ab."),
            ("The shop opens at {0}.", "Das Geschäft öffnet um {0} Uhr."),
            ("Please wake me at {0}.", "Bitte wecken Sie mich um {0} Uhr."),
        ],
    ),
    *_sentences(
        "time_words",
        pairs=[
            ("It is {0}.", "Es ist {0}."),
            ("The film starts at {0}.", "Der Film beginnt um {0}."),
        ],
    ),
    *_sentences(
        "date_long",
        "time_digits",
        pairs=[("The concert is on {0} at {1}.", "Das Konzert findet am {0} um {1} Uhr statt.")],
    ),
    *_sentences(
        "count",
        "date_long",
        pairs=[("The museum had {0} visitors on {1}.", "Am {1} hatte das Museum {0} Besucher.")],
    ),
    *_sentences(
        "price",
        "date_long",
        pairs=[("The ticket cost {0} on {1}.", "Am {1} kostete die Fahrkarte {0}.")],
    ),
)
"""The sentences of our own, in the order in which they are drawn by the corpus."""


@dataclass(frozen=True)
class CorpusPart:
    """Lines of one part of a corpus; line i of each list belongs to line i of the others.

    Attributes:
        sources: English lines, no two alike.
        targets: German lines.
        kinds: "number", "ordinal", "date", "price", "time" (alone on a line) or "sentence".
    """

    sources: list[str]
    targets: list[str]
    kinds: list[str]

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class NumbersCorpus:
    """The three parts of a generated corpus; no value of one part occurs in another (the module says what a value is).

    Attributes:
        train: what the model learns from.
        validation: held out, for choosing a checkpoint.
        test: held out, for the final score.
    """

    train: CorpusPart
    validation: CorpusPart
    test: CorpusPart


def generate_numbers_corpus(
    *,
    train_size: int = 60_000,
    validation_size: int = 500,
    test_size: int = 1_000,
    seed: int = 0,
    validation_fraction: float = 0.02,
    test_fraction: float = 0.1,
) -> NumbersCorpus:
    """Generate numbers, ordinals, dates, prices and times of day in English and German.

    The training part has every number below 1,000 that is not held out, alone on a line. All other lines are drawn:
    the kind of line, then the values and how they are written. The held-out parts are drawn in the same way from
    held-out values.

    Args:
        train_size: number of training lines, at least 1,000.
        validation_size: number of validation lines.
        test_size: number of test lines.
        seed: the same seed and the same versions of `num2words` and `babel` give the same corpus.
        validation_fraction: share of all values that only validation lines may use.
        test_fraction: share of all values that only test lines may use.

    Returns:
        The corpus; each part shuffled.

    Raises:
        ImportError: num2words or babel is not installed.
        ValueError: a size or a fraction out of range, or more lines asked for than there are different ones.
    """
    for name, size, least in (
        ("train_size", train_size, 1000),
        ("validation_size", validation_size, 0),
        ("test_size", test_size, 0),
    ):
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
    for name, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise ValueError(f"{name} must lie between 0 and 1, both excluded, got {fraction}")
    if validation_fraction + test_fraction > 0.5:
        raise ValueError(
            "validation_fraction and test_fraction together must leave at least half of the values to training, got "
            f"{validation_fraction} and {test_fraction}"
        )
    libraries = _import_libraries()
    rng = random.Random(seed)

    def split(count: int, always_training: int = 0) -> bytearray:
        """The part that each of `count` values belongs to; the first `always_training` of them are never held out."""
        parts = bytearray(count)
        validation_count = max(1, round(count * validation_fraction))
        test_count = max(1, round(count * test_fraction))
        held_out = rng.sample(range(always_training, count), validation_count + test_count)
        for value in held_out[:validation_count]:
            parts[value] = _VALIDATION
        for value in held_out[validation_count:]:
            parts[value] = _TEST
        return parts

    parts_of = {
        "number": split(NUMBER_LIMIT, always_training=1),
        "day": split(12 * 31),
        "time": split(12 * 60),
    }

    def part(which: int, size: int) -> CorpusPart:
        writer = _Writer(rng, libraries, parts_of, which)
        lines: dict[str, tuple[str, str]] = {}
        if which == _TRAINING:
            for number in range(1000):
                if parts_of["number"][number] == _TRAINING:
                    source, target = writer.number_in_words(number)
                    lines[source] = (target, "number")
        kinds, weights = list(_KIND_WEIGHTS), list(_KIND_WEIGHTS.values())
        refused_in_a_row = 0
        while len(lines) < size:
            kind = rng.choices(kinds, weights)[0]
            source, target = writer.line(kind)
            if source in lines:
                refused_in_a_row += 1
                if refused_in_a_row > 1000:
                    raise ValueError(
                        f"no more than about {len(lines)} different lines can be drawn for this part, got a size of "
                        f"{size}; ask for fewer lines or for a larger fraction of held-out values"
                    )
                continue
            refused_in_a_row = 0
            lines[source] = (target, kind)
        shuffled = list(lines.items())
        rng.shuffle(shuffled)
        return CorpusPart(
            sources=[source for source, _ in shuffled],
            targets=[target for _, (target, _) in shuffled],
            kinds=[kind for _, (_, kind) in shuffled],
        )

    # The held-out parts first: how many training lines are asked for must not change what is tested.
    test = part(_TEST, test_size)
    validation = part(_VALIDATION, validation_size)
    return NumbersCorpus(train=part(_TRAINING, train_size), validation=validation, test=test)


def _import_libraries() -> SimpleNamespace:
    """num2words and the parts of babel that are used, or an ImportError that says how to install them."""
    try:
        from babel.dates import format_date, format_time
        from babel.numbers import format_currency, format_decimal
        from num2words import num2words
    except ImportError as error:
        raise ImportError(
            f"the generated corpus needs num2words and babel ({error}); install them with "
            'pip install "vanilla-transformer[demo]"'
        ) from error
    return SimpleNamespace(
        # Spelling is most of the work, and parts of prices, days and times come again and again.
        num2words=functools.lru_cache(maxsize=None)(num2words),
        format_date=format_date,
        format_time=format_time,
        format_currency=format_currency,
        format_decimal=format_decimal,
    )


class _Writer:
    """Draws values of one part and writes each in English and in German.

    Methods named after a slot take no argument and return (English, German) for a newly drawn value.

    Args:
        rng: the source of all chance.
        libraries: what `_import_libraries` returns.
        parts_of: for "number", "day" and "time" the part that each value belongs to.
        part: the part to draw from.
    """

    def __init__(
        self, rng: random.Random, libraries: SimpleNamespace, parts_of: dict[str, bytearray], part: int
    ) -> None:
        self.rng = rng
        self.libraries = libraries
        self.parts_of = parts_of
        self.part = part
        self.first_day = datetime.date(1950, 1, 1)
        self.days = (datetime.date(2050, 1, 1) - self.first_day).days
        self.alone: dict[str, tuple[Callable[[], tuple[str, str]], ...]] = {
            "number": (lambda: self.number_in_words(self.draw_number()),),
            "ordinal": (self.ordinal,),
            "date": (self.date_long, self.date_full, self.date_short, self.date_words),
            "price": (self.price_alone,),
            "time": (self.time_digits, self.time_words),
            "sentence": (self.sentence,),
        }

    def line(self, kind: str) -> tuple[str, str]:
        """One line of a kind, (English, German)."""
        return self.rng.choice(self.alone[kind])()

    def sentence(self) -> tuple[str, str]:
        sentence = self.rng.choice(SENTENCES)
        values = [getattr(self, slot)() for slot in sentence.slots]
        source = sentence.source.format(*(english for english, _ in values))
        return source, sentence.target.format(*(german for _, german in values))

    # Values

    def draw_number(self, limit: int = NUMBER_LIMIT) -> int:
        """A number of this part below `limit`, a power of ten: first how many digits it has, then which one it is."""
        digit_counts = range(1, len(str(limit)))
        while True:
            digits = self.rng.choices(digit_counts, _DIGIT_WEIGHTS[: len(digit_counts)])[0]
            number = self.rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
            if self.parts_of["number"][number] == self.part:
                return number

    def draw_date(self) -> datetime.date:
        while True:
            date = self.first_day + datetime.timedelta(days=self.rng.randrange(self.days))
            if self.parts_of["day"][(date.month - 1) * 31 + date.day - 1] == self.part:
                return date

    def draw_time(self) -> datetime.time:
        while True:
            time = datetime.time(self.rng.randrange(24), self.rng.randrange(60))
            if self.parts_of["time"][time.hour % 12 * 60 + time.minute] == self.part:
                return time

    # Numbers

    def number_in_words(self, number: int) -> tuple[str, str]:
        spell = self.libraries.num2words
        return spell(number, lang="en"), spell(number, lang="de")

    def words_or_digits(self, number: int) -> tuple[str, str]:
        if self.rng.random() < 0.5:
            return self.number_in_words(number)
        write = self.libraries.format_decimal
        return write(number, locale="en"), write(number, locale="de")

    def number(self) -> tuple[str, str]:
        return self.words_or_digits(self.draw_number())

    def label(self) -> tuple[str, str]:
        """A number after its noun: a page, a room."""
        while (number := self.draw_number(1000)) == 0:
            pass
        return self.words_or_digits(number)

    def count(self) -> tuple[str, str]:
        """A number before a plural noun; none that ends in -eins, which German inflects or not by taste."""
        while (number := self.draw_number()) == 0 or number % 100 == 1:
            pass
        return self.words_or_digits(number)

    def draw_ordinal(self) -> int:
        while (number := self.draw_number(ORDINAL_LIMIT)) == 0:
            pass
        return number

    def ordinal(self, ending: str = "") -> tuple[str, str]:
        """An ordinal in words (German ends in -e, to which `ending` is added) or in digits (German has a stop)."""
        number, spell = self.draw_ordinal(), self.libraries.num2words
        if self.rng.random() < 0.7:
            return spell(number, lang="en", to="ordinal"), spell(number, lang="de", to="ordinal") + ending
        return spell(number, lang="en", to="ordinal_num"), spell(number, lang="de", to="ordinal_num")

    def ordinal_en(self) -> tuple[str, str]:
        return self.ordinal(ending="n")

    def ordinal_es(self) -> tuple[str, str]:
        return self.ordinal(ending="s")

    # Dates

    def date(self, date: datetime.date, pattern: str) -> tuple[str, str]:
        write = self.libraries.format_date
        return write(date, pattern, locale="en"), write(date, pattern, locale="de")

    def date_long(self) -> tuple[str, str]:
        return self.date(self.draw_date(), "long")

    def date_full(self) -> tuple[str, str]:
        return self.date(self.draw_date(), "full")

    def date_full_der(self) -> tuple[str, str]:
        """A full date; German has the article between the day of the week and the date, as a sentence needs it."""
        date = self.draw_date()
        weekday, long = self.date(date, "EEEE")[1], self.date(date, "long")[1]
        return self.date(date, "full")[0], f"{weekday}, der {long}"

    def date_short(self) -> tuple[str, str]:
        return self.date(self.draw_date(), "short")

    def date_words(self, article: str = "der ", ending: str = "") -> tuple[str, str]:
        date, spell = self.draw_date(), self.libraries.num2words
        english_month, german_month = self.date(date, "MMMM")
        english_day, german_day = (spell(date.day, lang=language, to="ordinal") for language in ("en", "de"))
        return f"the {english_day} of {english_month}", f"{article}{german_day}{ending} {german_month}"

    def date_words_en(self) -> tuple[str, str]:
        """A day and month after "am"."""
        return self.date_words(article="", ending="n")

    # Prices

    def price(self, alone: bool = False) -> tuple[str, str]:
        """A price in words or digits; one euro and one cent in words only alone: the sentences need "einen"."""
        in_words = self.rng.random() < 0.5
        while True:
            whole, cents = self.draw_number(WHOLE_PRICE_LIMIT), self.rng.randrange(100)
            if alone or not in_words or (whole != 1 and cents != 1):
                break
        # Two decimal places even where they are zero: num2words reads a whole amount as cents.
        amount = Decimal(f"{whole}.{cents:02}")
        if in_words:
            currency, spell = self.rng.choice(("EUR", "USD")), self.libraries.num2words
            english = spell(amount, to="currency", lang="en", currency=currency)
            return english, spell(amount, to="currency", lang="de", currency=currency)
        currency, write = self.rng.choice(("EUR", "USD", "GBP")), self.libraries.format_currency
        return write(amount, currency, locale="en"), write(amount, currency, locale="de")

    def price_alone(self) -> tuple[str, str]:
        return self.price(alone=True)

    # Times of day

    def time_digits(self) -> tuple[str, str]:
        time, write = self.draw_time(), self.libraries.format_time
        english = write(time, "short", locale="en")
        # babel puts a narrow no-break space before AM and PM, people type an ordinary one: the model should know both.
        if self.rng.random() < 0.5:
            english = english.replace(_NARROW_NO_BREAK_SPACE, " ")
        return english, write(time, "short", locale="de")

    def time_words(self) -> tuple[str, str]:
        """A time on the clock face, to the minute, without saying whether it is before or after noon."""
        time, spell = self.draw_time(), self.libraries.num2words
        hour, minute = (time.hour - 1) % 12 + 1, time.minute
        if minute == 0:
            german_hour = "ein" if hour == 1 else spell(hour, lang="de")
            return f"{spell(hour, lang='en')} o'clock", f"{german_hour} Uhr"
        english_word, german_word = "past", "nach"
        if minute > 30:
            english_word, german_word, minute, hour = "to", "vor", 60 - minute, hour % 12 + 1
        if minute == 1:
            english, german = "one minute", "eine Minute"
        else:
            english, german = f"{spell(minute, lang='en')} minutes", f"{spell(minute, lang='de')} Minuten"
        return (
            f"{english} {english_word} {spell(hour, lang='en')}",
            f"{german} {german_word} {spell(hour, lang='de')}",
        )
