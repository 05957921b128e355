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
    assert len(beams) == 3 and all(beam.has_ended for beam in beams)
    assert [beam.reward for beam in beams] == sorted(map(commas, "   ", seen), reverse=True)[:3]
    assert len({beam.text for beam in beams}) == 3
    first_lines = {text.split("\n")[0] for text in seen}
    assert all(beam.text.split("\n")[0] in first_lines for beam in beams)


def test_rewards_of_python():
    assert parses("def f():\n", "    return 1\n") == 1.0
    assert parses("def f():\n", "    return (1,\n") == 0.5  # may still be completed
    assert parses("def f(:\n", "    return 1\n    x = 2\n") == 0.0
    assert parses("", "x = 1\nx = 1\n") == 0.99


def test_as_a_command(demo_bundle):
    from examples.step_search import main

    done = called(main, demo_bundle, "x = ", "--num-steps", 1, "--num-beams", 2, "--width", 2)
    assert done.exit_code == 0 and done.stdout.count("x = ") == 2
