"""Budget of drafts: bounds what they may lose, whatever is estimated, and buys tries.

Counted in iterations without a draft: 0.5 is half the time of one. A draft costs its calls, its
rows and the loop's own time, a prompt that the draft model reads included, and earns the iterations
that it has saved; none may cost more than the balance. Every iteration adds a share of its time,
2 % at first. The share of a first short answer is there from the start, and the next one is added
after that many iterations: so drafts lose at most 2 %, all requests together.

If estimates say that no draft pays, one layer is tried once the shares since the last draft pay for
it: at 0.16 iterations a try, after 8 iterations. Every try that does not pay halves the share; a
draft that pays quadruples it, up to 2 %. So tries of a draft that is never right become rare: after
8, 16, ... 64 iterations. Once drafts have lost 2 iterations more than they earned, only tries are
made, whatever is estimated.
"""

import math
from dataclasses import dataclass

SHARE = 0.02
_SHORT_ANSWER = 64  # iterations
_MOST = 3.0  # iterations: what was earned long ago is no reason to lose more
_LEAST_SHARE = SHARE / 8
_LOST = -2.0  # iterations
_MOST_LOST_AT_ONCE = -0.5  # iterations: a prompt to be read says nothing about the next drafts


@dataclass
class DraftBudget:
    """Budget for rejected drafts, in iterations without a draft; kept from request to request.

    Attributes:
        balance: negative after a draft that cost more than was expected.
        most: upper limit of the balance, the prompt that the draft model reads included.
        share: added by an iteration; ``saved``: the shares since the last draft.
        gained: iterations that drafts have earned beyond their cost, the latest counting most.
    """

    balance: float = SHARE * _SHORT_ANSWER
    most: float = _MOST
    share: float = SHARE
    saved: float = 0.0
    gained: float = 0.0
    num_prepaid: int = _SHORT_ANSWER  # iterations whose share is in the balance already

    @property
    def believes_estimates(self) -> bool:
        """Whether a draft may be made because it is expected to pay; else tries alone are made."""
        return self.gained >= _LOST

    def begin_request(self, prompt: float, draft_prompt: float) -> None:
        """Add the share of a prompt, by its cost to the target and to the draft model."""
        self.most = _MOST + draft_prompt
        self.add(self.share * prompt)

    def pass_iteration(self) -> None:
        """Add the share of one iteration."""
        self.saved += self.share
        if self.num_prepaid:
            self.num_prepaid -= 1
        else:
            self.add(self.share)

    def add(self, earned: float) -> None:
        """Add earnings less their cost, which may be negative."""
        balance = self.balance + earned
        if earned > 0.0 and balance > self.most:  # a balance beyond the limit stays
            balance = max(self.balance, self.most)
        self.balance = balance

    def settle(self, cost: float, earned: float, *, is_try: bool) -> None:
        """Count a draft of this cost, which has earned so much."""
        self.add(earned - cost)
        self.gained = 0.99 * self.gained + max(earned - cost, _MOST_LOST_AT_ONCE)
        self.gained = min(max(self.gained, 2.0 * _LOST), _MOST)
        self.saved = 0.0
        if earned > cost:
            self.share = min(4.0 * self.share, SHARE)
        elif is_try or not self.believes_estimates:
            self.share = max(0.5 * self.share, _LEAST_SHARE)

    def iterations_until(self, cost: float, *, is_try: bool = False) -> int:
        """Return after how many iterations their shares pay for a draft of this cost."""
        num_iterations = 0.0
        if cost > self.balance:
            num_iterations = self.num_prepaid + (cost - self.balance) / self.share
        if is_try:
            num_iterations = max(num_iterations, (cost - self.saved) / self.share)
        return math.ceil(num_iterations)
