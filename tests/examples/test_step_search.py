"""The example of a search by steps: rewards decide, and every text is a continuation."""

from dsbd_ort import Pipeline
from examples.step_search import parses, step_search
from tests.commands.calls import called


def test_the_reward_decides(demo_pipe: Pipeline):
    prompt, seen = "def read_json(", []

    def commas(prompt: str, text: str) -> float:
        seen.append(text)
        return text.count(",")

    options = {"num_beams": 3, "width": 4, "num_steps": 2, "max_new_tokens": 24}
    beams = step_search(demo_pipe, prompt, commas, **options)
    first, second = seen[:4], seen[4:]
    assert len({*first}) == 4
    kept = sorted(first, key=lambda text: -text.count(","))[:3]
    candidates = {*second, *(text for text in kept if not text.endswith("\n"))}
    rewards = sorted((text.count(",") for text in candidates), reverse=True)
    assert [beam.reward for beam in beams] == rewards[:3]
    assert {beam.text for beam in beams} <= candidates and all(beam.has_ended for beam in beams)
    assert all(any(text.startswith(line) for line in kept) for text in second)


def test_rewards_of_python():
    assert parses("def f():\n", "    return 1\n") == 1.0
    assert parses("def f():\n", "    return (1,\n") == 0.5  # may still be completed
    assert parses("def f(:\n", "    return 1\n    x = 2\n") == 0.0
    assert parses("", "x = 1\nx = 1\n") == 0.99


def test_as_a_command(demo_bundle):
    from examples.step_search import main

    done = called(main, demo_bundle, "x = ", "--num-steps", 1, "--num-beams", 2, "--width", 2)
    assert done.exit_code == 0 and done.stdout.count("x = ") == 2
