"""Texts on which two implementations of one tokenizer differ if they differ at all.

Deterministic, and small enough to be encoded each time that a fast implementation is loaded.
"""

from collections.abc import Sequence

_SCRIPTS = (
    "The quick brown fox, aged 3½, isn't the dogs' — they'LL'VE 'S 't I'm you'RE x'd ''s",
    "def f(x_1):\n\tif x!=0:\n        return {'a': [1,2,3]}  # naïve\n\n\n    \n",
    "MixedCASEWords camelCase SCREAMING_SNAKE http://example.org/a?b=c&d=%20#e user@host.org",
    "Größe ẞ ıİ Ǆǅǆ ﬁ ſ \u212b A\u030a \xe9 e\u0301 ñ o\u0332\u0308\u036f Z\u0334\u0327\u0357 a\u0301\u0301b",
    "числа και ΟΔΟΣ עִבְרִית العَرَبِيَّة १२३ हिन्दी ไทยเขียนติดกัน ខ្មែរ 한국어 ᄒ\u1161\u11ab 日本語。中文，𠮷𪛕",
    "12345678901234567890 1,234.5678e-90 ٣٤٥ ⅧⅨ ²³ ①② 0x1F 007",
    "😀😃 \U0001f469\u200d\U0001f467\u200d\U0001f466 👍🏽 🇩🇪🇫🇷 \u2764\ufe0f 1\ufe0f\u20e3 \U000e0067\u200d\ufe0f",
    "a\u200bb\u200cc\u200dd\ufeffe\u2060f\u00adg\u202eh\u2066i\u061cj",
    "a b\tc\r\nd\ne\r\rf\x0bg\x0ch\x1ci\x1dj\x1ek\x1fl\x85m\xa0n\u1680o\u2003p\u2028q\u2029r\u3000s",
    "\x00\x01\x02\x7f\x80\x9f\ufffd\ufffe\uffff\ue000\U000f0000\U0010ffff",
    "!!!???...,,,;;;:::---___***///\\\\\\|||&&&%%%$$$###@@@~~~```^^^<<<>>>===+++((()))[[[]]]{{{}}}",
)
_SPACES = (" ", "  ", "\n", "\n\n", "\r\n", " \n", "\n ", "\t", "\t ", "\xa0", "\u3000", "\r")
_RUNS = ("a", "ab", "A", "0", "12", " ", "\n", "\t", "!", "=", "-", "é", "日", "ก", "😀", "\x00")
_WORDS = ("x", "X", "1", "!", "'s", "日", "")
_RUN_LENGTH = 700  # characters; enough for every repeated token that vocabularies hold


def adversarial_texts(special_tokens: Sequence[str] = ()) -> list[str]:
    """Return the texts; each special token is spelled in some of them."""
    texts = ["", *_SCRIPTS, *("".join(_SCRIPTS[i:]) for i in (3, 7))]
    texts += [(run * _RUN_LENGTH)[:_RUN_LENGTH] for run in _RUNS]
    texts += [f"x{run * 5}y {run * 4} {run * 3}" for run in _RUNS]
    texts += [
        f"{before}{space}{after}" for space in _SPACES for before in _WORDS for after in _WORDS
    ]
    texts += [f"{one}{two}x" for one in _SPACES for two in _SPACES]
    texts += _characters()
    for token in special_tokens:
        texts += [
            token,
            f"a{token}b {token}  {token}\n",
            f" {token}{token}1",
            token[:-1],
            token[1:],
        ]
    return texts


def _characters() -> list[str]:
    """Return texts with characters of every plane, each within words and alone."""
    points = [*range(0x250), *range(0x250, 0x20000, 89), *range(0x20000, 0x110000, 6007)]
    points += [plane * 0x10000 + 0xFFFF for plane in range(17)]
    letters = [chr(point) for point in points if not 0xD800 <= point <= 0xDFFF]
    return [
        "".join(f"a{letter}b {letter}{letter}1'{letter}" for letter in letters[i : i + 64])
        for i in range(0, len(letters), 64)
    ]
