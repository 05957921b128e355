"""Table of the kinds of parts; an engine that lacks a kind takes its errors from here."""

from dsbd_runtime.parts.alignment import Alignment
from dsbd_runtime.parts.attention_rows import Rows
from dsbd_runtime.parts.features import FeaturesOfDraft, FeaturesOfTarget
from dsbd_runtime.parts.head import Head
from dsbd_runtime.parts.part import Part
from dsbd_runtime.parts.recent_rows import RecentRows
from dsbd_runtime.parts.sources import Sources

KINDS: tuple[type[Part], ...] = (
    Rows,
    RecentRows,
    Sources,
    FeaturesOfTarget,
    FeaturesOfDraft,
    Head,
    Alignment,
)
