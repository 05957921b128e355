"""A pipeline that takes as long as it is told, by a clock that only it moves."""

from dsbd_ort.decoding import DecodingStats
from dsbd_ort.requests.results import GeneratedSequence, GenerationResult

LOGPROB = -0.5  # of a token


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakePipeline:
    """Every request gives 4 tokens; ``seconds`` is a number per strategy.

    Tokens are the seed's, so they are the same for all strategies but those in ``others``.
    """

    def __init__(self, clock, seconds, others=()):
        self.clock = clock
        self.seconds = seconds
        self.others = others
        self.requests = []

    def generate(self, prompt, **options):
        strategy, seed = options["strategy"], options["seed"]
        self.requests.append((strategy, prompt, seed))
        self.clock.now += self.seconds[strategy]
        token_ids = [seed, 1, 2, 3 + (strategy in self.others)]
        scores = {"logprob": 4 * LOGPROB, "token_logprobs": [LOGPROB] * 4, "score": LOGPROB}
        best = GeneratedSequence(token_ids=token_ids, **scores, finish_reason="length", text="")
        return GenerationResult([best], stats(), seed=0)


def stats(**changes):
    """2 iterations of 2 drafted layers of 4 tokens; the first accepted 2 and the second none."""
    values = {
        "num_iterations": 2,
        "num_draft_tokens": 16,
        "num_accepted_tokens": 8,
        "num_draft_layers": 4,
        "num_accepted_layers": 2,
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 0, 1],
        "mean_beam_width": 3.0,
        "num_prompt_tokens": 5,
        "num_output_tokens": 4,
        "target_rows": 10,
        "draft_rows": 8,
        "target_calls": 3,
        "draft_calls": 5,
        "time_to_first_token_s": 0.1,
        "time_per_output_token_s": 0.1,
        "tokens_per_s": 10.0,
        "draft_s": 0.08,
        "target_s": 0.2,
        "host_s": 0.02,
        "kv_bytes_peak": 1000,
    }
    return DecodingStats(**{**values, **changes})
