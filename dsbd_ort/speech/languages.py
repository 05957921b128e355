"""Languages of speech models: their codes and English names."""

import re
from collections.abc import Collection
from typing import Protocol

from dsbd_ort.decoding.option_values import did_you_mean, shown
from dsbd_runtime.errors import InputError

LANGUAGE_NAMES = {
    **{"af": "afrikaans", "am": "amharic", "ar": "arabic", "as": "assamese", "az": "azerbaijani"},
    **{"ba": "bashkir", "be": "belarusian", "bg": "bulgarian", "bn": "bengali", "bo": "tibetan"},
    **{"br": "breton", "bs": "bosnian", "ca": "catalan", "cs": "czech", "cy": "welsh"},
    **{"da": "danish", "de": "german", "el": "greek", "en": "english", "es": "spanish"},
    **{"et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish", "fo": "faroese"},
    **{"fr": "french", "gl": "galician", "gu": "gujarati", "ha": "hausa", "haw": "hawaiian"},
    **{"he": "hebrew", "hi": "hindi", "hr": "croatian", "ht": "haitian creole", "hu": "hungarian"},
    **{"hy": "armenian", "id": "indonesian", "is": "icelandic", "it": "italian", "ja": "japanese"},
    **{"jw": "javanese", "ka": "georgian", "kk": "kazakh", "km": "khmer", "kn": "kannada"},
    **{"ko": "korean", "la": "latin", "lb": "luxembourgish", "ln": "lingala", "lo": "lao"},
    **{"lt": "lithuanian", "lv": "latvian", "mg": "malagasy", "mi": "maori", "mk": "macedonian"},
    **{"ml": "malayalam", "mn": "mongolian", "mr": "marathi", "ms": "malay", "mt": "maltese"},
    **{"my": "myanmar", "ne": "nepali", "nl": "dutch", "nn": "nynorsk", "no": "norwegian"},
    **{"oc": "occitan", "pa": "punjabi", "pl": "polish", "ps": "pashto", "pt": "portuguese"},
    **{"ro": "romanian", "ru": "russian", "sa": "sanskrit", "sd": "sindhi", "si": "sinhala"},
    **{"sk": "slovak", "sl": "slovenian", "sn": "shona", "so": "somali", "sq": "albanian"},
    **{"sr": "serbian", "su": "sundanese", "sv": "swedish", "sw": "swahili", "ta": "tamil"},
    **{"te": "telugu", "tg": "tajik", "th": "thai", "tk": "turkmen", "tl": "tagalog"},
    **{"tr": "turkish", "tt": "tatar", "uk": "ukrainian", "ur": "urdu", "uz": "uzbek"},
    **{"vi": "vietnamese", "yi": "yiddish", "yo": "yoruba", "yue": "cantonese", "zh": "chinese"},
}
"""The English name of each language code of Whisper models."""
OTHER_NAMES = {
    **{"burmese": "my", "castilian": "es", "flemish": "nl", "haitian": "ht", "mandarin": "zh"},
    **{"letzeburgesch": "lb", "moldavian": "ro", "moldovan": "ro", "panjabi": "pa"},
    **{"pushto": "ps", "sinhalese": "si", "valencian": "ca"},
}
OTHER_CODES = {"jv": "jw", "nb": "no"}  # current codes for which Whisper uses others
ENGLISH = "en"
DETECTED = "auto"  # name of the detected language, as in other programs
_TAG = re.compile(r"([a-z]{2,3})(-[a-z0-9]{2,8})*")  # en-us, zh-hant-tw


class HasLanguages(Protocol):
    """An entry of a model that supports languages."""

    @property
    def languages(self) -> Collection[str] | None:
        """Codes of the languages; None: only English."""


def code_of(language: str, speech: HasLanguages) -> str:
    """Return the code of a language that is given as code, English name, or name of its token.

    A tag such as zh-CN stands for its language. InputError: the model does not support it.
    """
    if not isinstance(language, str):
        raise InputError(
            f"language is a {type(language).__name__}; expected a code such as 'en', or a name"
        )
    asked = language.strip().lower().removeprefix("<|").removesuffix("|>")
    code_by_name = {name: code for code, name in LANGUAGE_NAMES.items()} | OTHER_NAMES
    code = code_by_name.get(asked, asked)
    supported: Collection[str] = {ENGLISH} if speech.languages is None else speech.languages
    if code not in supported and (tag := _TAG.fullmatch(asked.replace("_", "-"))):
        code = OTHER_CODES.get(tag[1], tag[1])
    if code in supported:
        return code
    if speech.languages is None:
        raise InputError(
            f"language is {shown(language)}, but the model supports only English; leave it out, or "
            "use a bundle of a model of several languages"
        )
    names = [*supported, *(name for name, code in code_by_name.items() if code in supported)]
    raise InputError(
        f"language is {shown(language)}{did_you_mean(asked, names)}; expected the code or the "
        f"English name of one of the {len(supported)} languages of this model, such as "
        f"{', '.join(list(supported)[:6])}"
    )
