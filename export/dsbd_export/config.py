"""Options of an export: of every model, of a draft, and which models are exported to where."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dsbd_export.errors import ExportError
from dsbd_export.tensorrt.tensorrt_options import TensorrtOptions
from dsbd_runtime.bundle_files.bundle import DTYPES
from dsbd_runtime.bundle_files.manifest import CUDA, FORMS, INT4_SYMMETRIC, PORTABLE, WEBGPU
from dsbd_runtime.parts.head.head import parse_num_top_logits
from dsbd_runtime.tensorrt.trt_module import FLAVOURS

OPSET = 24  # version of ai.onnx that has TensorScatter and Attention
MICROSOFT_DOMAIN = "com.microsoft"  # domain of operators that only ONNX Runtime has
HIDDEN = -3e4  # exp(HIDDEN) is 0; finite in float16 too, so that a row that sees nothing is not NaN
MIN_CONTEXT = 16  # the parity gate needs a prompt and a tree of three levels
MAX_CONTEXT = 2**31 - 1  # the largest number of a manifest
_MOST_THREADS = 1024
LEAST_DRAFT_VOCAB = 32  # room for the tokens that end a sequence; a smaller value is a mistake

INT8_ROWS, INT8_BLOCKS = "int8-dynamic", "int8"  # their names in the manifest
FULL, AUTO = "full", "auto"
LARGE_VOCABULARY = (
    16_384  # from this size on, computing a head row costs more than choosing its top tokens
)
USUAL_TOP_LOGITS = 64
FUSED, GROUPED, EXACT = ATTENTIONS = ("fused", "grouped", "exact")
ONNX = "onnx"
_QUANTIZED_DTYPES = {  # dtypes that onnxruntime's CPU provider supports: parity runs on it
    "none": DTYPES,
    "int8": ("fp32", "fp16"),
    "int8-blocks": ("fp32", "fp16"),
    INT8_ROWS: ("fp32",),
    "int4": ("fp32", "fp16"),
}


def quantization_of(quantize: str, dtype: str, form: str) -> str:
    """Return the kind of quantization that an option means; for "int4" zero points are ignored.

    "int8" in fp32 is for CPUs: rows are int8 per row, weights per channel. Products of 4 to 20 rows
    then need 0.68 to 0.86 of the time that they need with blocks; the KL divergence is 3.8e-3
    instead of 2.4e-3 (SmolLM2).
    """
    if quantize == "int8-blocks":
        return INT8_BLOCKS
    is_for_cpu = (dtype, form) == ("fp32", PORTABLE)
    return INT8_ROWS if quantize == "int8" and is_for_cpu else quantize


def check_num_threads(number: int | None) -> None:
    """Raise ExportError unless ``number`` is None or a valid number of threads."""
    if number is not None and not 1 <= number <= _MOST_THREADS:
        raise ExportError(f"num_threads={number} is out of range; use 1 to {_MOST_THREADS}")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of every model of an export: precision, outputs, and limits of the parity gate."""

    dtype: str = "fp32"  # precision of weights and caches: "fp32", "fp16" or "bf16"
    # weight compression: "none", "int8", "int8-blocks" or "int4"; "int8-dynamic" is another name
    # for "int8" in fp32, see ``quantization_of``
    quantize: str = "none"
    # files, folders or patterns of texts that decide the forms of products with int8 rows; none: a
    # text of this package decides
    calibration_texts: tuple[str, ...] = ()
    # output of the engines: "full", "topk:K" for the K largest logits of a row, or "auto":
    # "topk:64" for a large vocabulary, else "full", see ``for_vocabulary``
    logits: str = AUTO
    # "fused", "grouped" (see ``optimize``) or "exact" (see ``exact_attention``); None: "exact" if
    # products round their rows to int8, else "fused"
    attention: str | None = None
    # "portable"; "cuda", with fewer kernels on a GPU, see ``cuda_graph``; or "webgpu", for ONNX
    # Runtime's plug-in of that name, see ``webgpu_graph``
    form: str = PORTABLE
    text_only: bool = False  # export only the text part of a model that reads sound or pictures
    engine: str = ONNX  # or "tensorrt" or "tensorrt-rtx" for engines in addition to the ONNX files
    compute_capability: str | None = None  # see ``tensorrt_options``
    capacity: int | None = None  # see ``tensorrt_options``
    # largest absolute logit error that passes the parity gate, for fp32 without quantization, and
    # largest mean KL divergence, for all other exports; None for the limits in ``parity``
    atol: float | None = None
    max_kl: float | None = None
    # upper limits of tokens; ``max_source`` is for an encoder-decoder's source. If positions are
    # relative, the model has no limits and these numbers are used
    max_context: int | None = None
    max_source: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    num_threads: int | None = None  # threads of torch and of the compared engines

    def __post_init__(self) -> None:
        self._check_choices()
        if self.calibration_texts and not self._takes_texts():
            raise ExportError(
                f"calibration_texts={self.calibration_texts[0]!r} has no meaning with quantize="
                f"{self.quantize!r}, dtype={self.dtype!r} and form={self.form!r}; use quantize="
                "'int8' in fp32, or leave it out"
            )
        self._check_attention()
        self._check_form()
        self._check_engine()
        try:
            _ = self.num_top_logits
        except ValueError as error:
            raise ExportError(
                f"logits={self.logits!r} is no kind of output; use auto, full, or topk:K with K "
                "from 1 to the vocabulary's size, as topk:64"
            ) from error
        self._check_limits()
        check_num_threads(self.num_threads)
        for field in ("max_context", "max_source"):
            length: int | None = getattr(self, field)
            if length is not None and length < MIN_CONTEXT:
                raise ExportError(f"{field}={length} is too short; use at least {MIN_CONTEXT}")

    def for_vocabulary(self, vocab_size: int, *, reads_all: bool = False) -> Self:
        """Return the options for a vocabulary; ``logits`` "auto" is replaced by its choice."""
        if self.logits != AUTO:
            return self
        is_large = vocab_size >= LARGE_VOCABULARY and self.engine == ONNX and not reads_all
        return dataclasses.replace(self, logits=self._usual_top_logits() if is_large else FULL)

    def _usual_top_logits(self) -> str:
        return f"topk:{USUAL_TOP_LOGITS}"

    @property
    def num_top_logits(self) -> int:
        """Return K of "topk:K", 0 for other outputs."""
        return 0 if self.logits == AUTO else parse_num_top_logits(self.logits)

    @property
    def tensorrt(self) -> TensorrtOptions | None:
        """Return the options of the TensorRT engines, None if none are built."""
        if self.engine == ONNX:
            return None
        return TensorrtOptions(
            engine=self.engine,
            compute_capability=self.compute_capability,
            capacity=self.capacity,
        )

    @property
    def attention_form(self) -> str:
        if self.attention is not None:
            return self.attention
        return EXACT if self.rounds_rows else FUSED

    @property
    def quantized_form(self) -> str:
        """Return the quantization's name in the manifest, one of ``QUANTIZED_FORMS``.

        In fp16, blocks of 4 bits are symmetric: CUDA's products of fp16 rows support no others.
        """
        is_symmetric = (self.quantize, self.dtype) == ("int4", "fp16")
        return INT4_SYMMETRIC if is_symmetric else self.quantization

    @property
    def quantization(self) -> str:
        """Return the kind of quantization: "none", "int8-dynamic", "int8" or "int4"."""
        return quantization_of(self.quantize, self.dtype, self.form)

    @property
    def rounds_rows(self) -> bool:
        """Return whether products round their rows to int8, so that their forms matter."""
        return self._rounds_rows(self.quantize)

    def _rounds_rows(self, quantize: str | None) -> bool:
        is_for_cpu = (self.dtype, self.form) == ("fp32", PORTABLE)
        # On a GPU, products with blocks read fp16 rows without rounding them.
        return quantize == INT8_ROWS or (is_for_cpu and quantize in ("int8", "int8-blocks"))

    @property
    def sums_integers(self) -> bool:
        """Whether exact attention adds up integers, to which weights and values are rounded."""
        return self.attention_form == EXACT and (self.quantize, self.form) != ("none", PORTABLE)

    @property
    def is_exact(self) -> bool:
        """Return whether the export may differ from the checkpoint by rounding in fp32 only."""
        return (self.dtype, self.quantize) == ("fp32", "none") and not self.sums_integers

    def _check_choices(self) -> None:
        choices = (
            ("dtype", DTYPES),
            ("quantize", tuple(_QUANTIZED_DTYPES)),
            ("attention", (None, *ATTENTIONS)),
            ("form", FORMS),
            ("engine", (ONNX, *FLAVOURS)),
        )
        for field, allowed in choices:
            if (value := getattr(self, field)) not in allowed:
                names = ", ".join(name for name in allowed if name is not None)
                raise ExportError(f"{field}={value!r} is not known; use one of {names}")
        if self.dtype not in (dtypes := _QUANTIZED_DTYPES[self.quantize]):
            raise ExportError(
                f"quantize={self.quantize!r} has no form in dtype={self.dtype!r}; use dtype="
                f"{' or '.join(map(repr, dtypes))}, or quantize='none'"
            )

    def _takes_texts(self) -> bool:
        return self.rounds_rows

    def _check_attention(self) -> None:
        if self.attention != EXACT:
            return
        wrong = None
        if self.dtype != "fp32":
            wrong = f"dtype={self.dtype!r}"
        elif self.engine != ONNX:
            wrong = f"engine={self.engine!r}"
        if wrong:
            raise ExportError(
                f"attention={EXACT!r} has no form for {wrong}, whose products depend on other "
                f"rows of a call; use dtype='fp32' and engine={ONNX!r}, or leave attention out"
            )

    def _check_form(self) -> None:
        if self.form == PORTABLE:
            return
        if self.engine != ONNX:
            raise ExportError(
                f"form={self.form!r} has operators of ONNX Runtime, which engine={self.engine!r} "
                f"does not know; use form={PORTABLE!r}, or engine={ONNX!r}"
            )
        if self.form == CUDA and self.attention_form == EXACT:
            raise ExportError(
                f"form={CUDA!r} is for a GPU, where attention={EXACT!r} (the default with "
                f"quantize='int8-dynamic') keeps no bits; use form={PORTABLE!r}, or quantize='int8'"
                f" with attention={FUSED!r}"
            )
        if (self.form, self.attention, self.quantize) == (WEBGPU, EXACT, "int4"):
            raise ExportError(
                f"attention={EXACT!r} has no form for quantize='int4' and form={WEBGPU!r}, whose "
                "products of 4 bits depend on the number of rows; use quantize='int8' or 'none'"
            )
        if self.form == WEBGPU and self.dtype == "bf16":
            raise ExportError(f"form={WEBGPU!r} has no bf16, as WebGPU; use dtype='fp16'")
        if self.form == WEBGPU and self.quantization == INT8_ROWS:
            raise ExportError(
                f"form={WEBGPU!r} has no product of int8 rows and weights (MatMulInteger), which "
                f"quantize={self.quantize!r} needs; use quantize='int8', which is blocks of "
                f"weights there, or form={PORTABLE!r}"
            )

    def _check_engine(self) -> None:
        if self.tensorrt is None:
            for field in ("compute_capability", "capacity"):
                if (value := getattr(self, field)) is not None:
                    raise ExportError(
                        f"{field}={value!r} has no meaning for engine={ONNX!r}; use engine="
                        f"{' or '.join(map(repr, FLAVOURS))}, or leave it out"
                    )
        elif self.quantize != "none":
            raise ExportError(
                f"quantize={self.quantize!r} runs on ONNX Runtime only, not in engine="
                f"{self.engine!r}; use quantize='none' with dtype='fp16'"
            )

    def _check_limits(self) -> None:
        for field, example in (("atol", 1e-4), ("max_kl", 0.01)):
            value = getattr(self, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ExportError(
                    f"{field}={value} is no error limit; use a number above 0, as {example:g}"
                )
        meaningless, instead = ("max_kl", "atol") if self.is_exact else ("atol", "max_kl")
        if (value := getattr(self, meaningless)) is not None:
            raise ExportError(
                f"{meaningless}={value} has no meaning for dtype={self.dtype!r} with "
                f"quantize={self.quantize!r}; use {instead}"
            )


@dataclass(frozen=True, kw_only=True)
class DraftedOptions(ModelOptions):
    """Options of every model, and options of a draft alone."""

    # number of tokens that the draft may propose, see ``draft_vocabulary``; None: all
    draft_vocab: int | None = None
    # files, folders or patterns of texts, whose most frequent tokens are the proposed ones; without
    # texts, the tokens with the lowest ids
    draft_texts: tuple[str, ...] = ()
    draft_adapter: str | None = None

    def _usual_top_logits(self) -> str:
        return f"topk:{min(USUAL_TOP_LOGITS, self.draft_vocab or USUAL_TOP_LOGITS)}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab is None:
            if self.draft_texts:
                raise ExportError(
                    f"draft_texts={self.draft_texts[0]!r} has no meaning without draft_vocab; give "
                    "it, as draft_vocab=32768, or leave draft_texts out"
                )
        elif self.draft_vocab < self.num_top_logits or self.draft_vocab < LEAST_DRAFT_VOCAB:
            raise ExportError(
                f"draft_vocab={self.draft_vocab} is too few with logits={self.logits!r}; use at "
                f"least {max(self.num_top_logits, LEAST_DRAFT_VOCAB)}, as 32768"
            )


@dataclass(frozen=True, kw_only=True)
class ExportConfig(DraftedOptions):
    """Options of the export of a target, and of a draft for it."""

    target: str  # folder or Hugging Face hub id of the target checkpoint
    # folder or hub id of an adapter (PEFT) that is merged into the target; None: no adapter
    adapter: str | None = None
    # folder or hub id of the draft, or "mtp" for the head in the target's checkpoint, see
    # ``multi_token``; None: no draft
    draft: str | None = None
    # weight compression of the draft; None: the target's
    draft_quantize: str | None = None
    # whether the target's engine also returns hidden states, for a later feature draft; if a
    # feature draft is exported too, it always does
    features: bool = False
    output: Path  # folder of the bundle; an existing bundle there is replaced at the end

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("draft_quantize", "draft_vocab", "draft_adapter"):
            if self.draft is None and (value := getattr(self, field)) is not None:
                raise ExportError(
                    f"{field}={value!r} has no meaning without a draft; give one, or leave it out"
                )
        try:
            _ = self.of_draft
        except ExportError as error:
            raise ExportError(f"draft_quantize, of the draft: {error}") from error
        if self.features and self.engine != ONNX:
            raise ExportError(
                f"features=True has no form for engine={self.engine!r}; use engine={ONNX!r}, or "
                "leave features out"
            )

    @property
    def of_draft(self) -> ModelOptions:
        if self.draft_quantize is None or self.draft_quantize == self.quantize:
            return self
        # The limits are meant for the target's precision.
        texts = self.calibration_texts if self._rounds_rows(self.draft_quantize) else ()
        return dataclasses.replace(
            self,
            quantize=self.draft_quantize,
            draft_quantize=None,
            calibration_texts=texts,
            atol=None,
            max_kl=None,
        )

    def _takes_texts(self) -> bool:
        return self.rounds_rows or self._rounds_rows(self.draft_quantize)


@dataclass(frozen=True, kw_only=True)
class DraftConfig(DraftedOptions):
    """Options of the export of a draft for the target of an existing bundle."""

    bundle: Path
    draft: str
    draft_quantize: str | None = (
        None  # same as ``quantize``, because the target is not exported again
    )

    def __post_init__(self) -> None:
        if self.draft_quantize is None:
            super().__post_init__()
            return
        if self.quantize not in ("none", self.draft_quantize):
            raise ExportError(
                f"quantize={self.quantize!r} and draft_quantize={self.draft_quantize!r} are both "
                "of the draft, as the target of the bundle is kept; give one of them"
            )
        object.__setattr__(self, "quantize", self.draft_quantize)
        try:
            super().__post_init__()
        except ExportError as error:
            raise ExportError(f"draft_quantize, of the draft: {error}") from error
