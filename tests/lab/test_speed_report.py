"""Report of lab/run speed: labels of the picture lie apart, tables hold what was found."""

from typing import Any

from lab.speed import report


def test_draft_calls_are_counted_over_all_requests_of_a_run():
    def request(run: str, calls: int, seconds: float) -> dict[str, Any]:
        stats = {"draft_calls": calls, "draft_s": seconds, "num_iterations": 4}
        return {"run": run, "stats": stats}

    runs = [{"name": name, "draft_acceptance_rate": 0.625} for name in ("plain", "drafted")]
    requests = [request("plain", 0, 0.0), request("drafted", 2, 0.01), request("drafted", 10, 0.02)]
    found = report.draft_calls_of({"a twin": {"runs": runs, "measurements": requests}})
    # 0.03 s in 12 calls, over 8 iterations
    assert found.splitlines()[2:] == ["| a twin | drafted | 0.62 | 2.50 | 1.5 |"]


def test_twin_and_trained_pair_are_compared_request_by_request():
    def of_model(tokens: list[list[int]], rate: float) -> dict[str, Any]:
        runs = [{"name": "plain", "draft_acceptance_rate": None}]
        runs += [{"name": "drafted", "draft_acceptance_rate": rate}]
        requests = [
            {"run": "drafted", "prompt_index": 0, "repetition": number, "token_ids": ids}
            for number, ids in enumerate(tokens)
        ]
        return {"runs": runs, "measurements": requests[::-1]}

    found = report.same_drafts_of("1B", of_model([[5], [6]], 0.5), of_model([[5], [7]], 0.75))
    assert found.splitlines()[2:] == ["| drafted | 0.7500 | 0.5000 | 1/2 |"]
