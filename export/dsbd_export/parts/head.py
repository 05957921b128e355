"""Head: the logits of some nodes, and the top-k head on them."""

from contextlib import nullcontext
from typing import Any

import torch

from dsbd_export.capture.part import (
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
    Made,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.parts.draft_vocabulary import cut_head, spread
from dsbd_export.parts.topk_head import add_topk_head
from dsbd_runtime.parts.head import FULL, LOGIT_ROWS, LOGITS


class ExportedHead(ExportPart):
    """Logits over the vocabulary, (R, V) float32; -inf for tokens that a draft does not propose."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def contract(self) -> ExportContract:
        rows = Example((Axis("R", 3, least=0),))
        return ExportContract(
            inputs={LOGIT_ROWS: rows},
            outputs=(LOGITS,),
            entry={"logits": FULL, "full_logits": True},
            is_leading=True,
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        """See ExportPart; the head of the model is cut to the proposed tokens."""
        proposed, vocab_size = self._checkpoint.proposed_tokens, self._checkpoint.vocab_size
        graph._tokens = None
        if proposed is not None:
            cut_head(model, proposed)
            graph._tokens = torch.from_numpy(proposed)

        def chosen(call: CapturedCall) -> nullcontext[None]:
            call.arguments["logits_to_keep"] = call.inputs[LOGIT_ROWS]
            call.outputs[LOGITS] = lambda: spread(call.logits.float(), graph._tokens, vocab_size)
            return nullcontext()

        return chosen

    def complete(self, made: Made) -> dict[str, Any]:
        """See ExportPart; the head is put on the finished file and compared with its logits."""
        checkpoint, options = self._checkpoint, made.options
        cases = [reference.case for reference in made.references]
        keeps_logits = True
        if options.num_top_logits:
            made.report(
                f"{checkpoint.role}: adding the top-k head and comparing it with the logits"
            )
            keeps_logits = add_topk_head(made.judged, checkpoint, cases, options.num_top_logits)
        return {"logits": options.logits, "full_logits": keeps_logits}
