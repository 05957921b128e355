"""Wrong calls get a status and one line that says how to fix it; none of them crashes."""

from tests.embedding.conftest import PROGRAMS, output_of

OK, ERROR, QUEUE_FULL, CANCELLED = range(4)
NOT_OPEN = "this pipeline is not open; pass one that dsbd_open returned and that is not closed yet"
EXPECTED = [  # what is done, its status, how its message begins
    ("no error yet", OK, ""),
    ("open: no place", ERROR, "pipeline is NULL; expected a place for the opened pipeline"),
    ("open: no bundle", ERROR, "bundle is NULL; expected the folder of a bundle"),
    ("open: a place is cleared", OK, ""),
    ("open: nowhere", ERROR, "no bundle at /no/such/bundle: no such folder; make one with "),
    ("open: not UTF-8", ERROR, "bundle is invalid UTF-8: byte 0xff at 0"),
    ("open: no JSON", ERROR, "settings is invalid JSON (Expecting property name enclosed in "),
    ("open: no object", ERROR, "settings is [1]; expected a JSON object"),
    ("open: unknown setting", ERROR, "settings has 'bundle'; expected one of chat_defaults, "),
    ("open: wrong type", ERROR, "num_threads is True; expected a whole number"),
    ("open: wrong provider", ERROR, "no execution provider 'abacus' in this version; choose one"),
    ("open: wrong limit", ERROR, "max_requests is 0; expected a whole number from 1 to 2147483647"),
    ("generate: no request", ERROR, "request is NULL; expected a request"),
    ("generate: no prompt", ERROR, "a request needs exactly one of prompt, prompt_ids and mess"),
    ("generate: two prompts", ERROR, "a request needs exactly one of prompt, prompt_ids and me"),
    ("generate: not UTF-8", ERROR, "prompt is invalid UTF-8: byte 0xc3 at 2"),
    ("generate: options not UTF-8", ERROR, "options is invalid UTF-8: byte 0xff at 6"),
    ("generate: options no JSON", ERROR, "options is invalid JSON (Expecting property name"),
    ("generate: unknown option", ERROR, "unknown option 'prompt'; expected a field of DecodingCon"),
    ("generate: wrong option", ERROR, "num_beams is 0; expected at least 1"),
    ("generate: lone surrogate", ERROR, "strategy is '\\ud800'; expected one of dsbd, "),
    ("generate: too long", ERROR, "the prompt is too long for max_new_tokens 100000: this model"),
    ("generate: id out of range", ERROR, "the prompt has token id 1000000; expected 0 to 257, "),
    ("generate: too many ids", ERROR, "the prompt is too long: this model's maximum context le"),
    ("chat: no array", ERROR, 'messages is {"role": "user"}; expected a JSON array such as [{"ro'),
    ("chat: no template", ERROR, "tiny has no chat template: "),
    ("generate: cancelled", CANCELLED, "cancelled by on_step"),
    ("generate: no step after it", OK, ""),
    ("stats: no place", ERROR, "stats is NULL; expected a place for the text"),
    ("generate: no result wanted", OK, ""),
    (
        "generate: one beyond the queue",
        QUEUE_FULL,
        "the queue is full: 1 requests are running and 0 are waiting, the limits are 1 and",
    ),
    ("close: while a request runs", OK, ""),
    ("generate: closed", ERROR, NOT_OPEN),
    ("generate: never opened", ERROR, NOT_OPEN),
    ("generate: NULL", ERROR, NOT_OPEN),
    ("stats: closed", ERROR, NOT_OPEN),
    ("close: closed", ERROR, NOT_OPEN),
    ("close: NULL", OK, ""),
]


def test_every_wrong_call_has_its_status_and_message(compiled, tiny_bundle):
    bundle = tiny_bundle.path
    done = output_of(compiled(PROGRAMS / "misuse.c"), bundle.name, cwd=bundle.parent)
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert [name for name, _, _ in found] == [name for name, _, _ in EXPECTED]
    for (name, status, message), (_, wanted, begins) in zip(found, EXPECTED, strict=True):
        assert int(status) == wanted, name
        assert message.startswith(begins), name
