"""Credit of drafts: what they may still lose, so that no request is much slower than without them.

Estimates may be wrong, so drafts are made on credit, counted in iterations without a draft: 0.5 is
half the time of one. A draft takes what its calls, its rows and the loop itself cost, a prompt that
the draft model reads included, and brings the iterations that it has saved; none may cost more than
there is. Beside that the credit grows by 2 % of the time. The share of a first short answer is
there from the start, and none is added until that many iterations have passed: so drafts lose at
most 2 % of a short answer, and of everything longer, all requests together. When there will be
enough for a draft is known in advance: until then nothing is thought about.

A draft that takes 0.2 iterations and is never right: 1.28 allow for six, one more follows every ten
iterations, from the 65th on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE_AT_STAKE = 0.02  # of the time, beside what drafts have won
_SHORT_ANSWER = 64  # iterations
_MOST = 3.0  # iterations: what was won long ago is no reason to lose more


@dataclass
class DraftCredit:
    """What drafts may still cost in vain; kept from request to request.

    All in iterations without a draft.

    Attributes:
        balance: what there is; negative after a draft that cost more than was thought.
        most: what it may grow to: something for the draft, and the prompt that it reads in the
            requests of now. Drafts that win have that in hand for the next one.
        num_prepaid: iterations whose share is in the balance already.
    """

    balance: float = SHARE_AT_STAKE * _SHORT_ANSWER
    most: float = _MOST
    num_prepaid: int = _SHORT_ANSWER

    def begin_request(self, prompt: float, draft_prompt: float) -> None:
        """Add the share of a prompt that the target has read in ``prompt``.

        draft_prompt: what it takes the draft model.
        """
        self.most = _MOST + draft_prompt
        self.add(SHARE_AT_STAKE * prompt)

    def pass_iteration(self) -> None:
        """Add the share of one iteration."""
        if self.num_prepaid:
            self.num_prepaid -= 1
        else:
            self.add(SHARE_AT_STAKE)

    def add(self, won: float) -> None:
        """Add what a draft has won, less its cost; negative: it has lost."""
        balance = self.balance + won
        if won > 0.0 and balance > self.most:  # what is there beyond it stays
            balance = self.balance if self.balance > self.most else self.most
        self.balance = balance

    def iterations_until(self, needed: float) -> int:
        """Return after how many iterations their shares alone will have made it so much."""
        if needed <= self.balance:
            return 0
        return self.num_prepaid + math.ceil((needed - self.balance) / SHARE_AT_STAKE)
