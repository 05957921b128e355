"""The table of wings: packages that the core imports only when they are first used.

A wing imports the core. It registers here, and nowhere else in the core.
"""

import importlib
from types import ModuleType

_WINGS = {
    "media": "dsbd_ort.media.media_prompts",  # messages with sounds or pictures
    "speech": "dsbd_ort.speech.transcribing",  # transcripts of sounds
}


def wing(name: str) -> ModuleType:
    """Return the module of a wing."""
    return importlib.import_module(_WINGS[name])
