"""Language detection: whether a text is English, by a model that comes with its library."""

from functools import cache

from py3langid.langid import MODEL_FILE, LanguageIdentifier

# The languages of most of the web. With the rare ones in the choice, short texts go astray.
_LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr "
    "ne nl no pa pl pt ro ru sk sl so sq sv sw ta te th tl tr uk ur vi zh"
)


def is_english(text: str) -> bool:
    """Return whether English is the likeliest language of `text`; no letters are no English."""
    language, _ = _identifier().classify(text)
    return language == "en"


@cache
def _identifier() -> LanguageIdentifier:
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(_LANGUAGES.split())
    return identifier
