"""Masks of grammars against fresh matchers, over forests of states; tokens that are no text."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers

from dsbd_ort.constraints import Choice, GrammarTokenizer, JsonObject, JsonSchema, Lark, Regex
from dsbd_ort.constraints.grammar_matching import MOST_COMPILED, MOST_GRAMMAR_BYTES
from dsbd_ort.constraints.matcher_pool import MOST_RUNNERS
from dsbd_ort.decoding.errors import ConstraintError
from tests.constraints.forest_of_states import (
    EOS,
    TOKENIZER,
    TOKENIZER_JSON,
    VOCAB_SIZE,
    advanced,
    allowed_of,
    grammar_tokenizer,
    ids_of,
    random_text,
    tokens_of,
)
from tests.constraints.json_schemas import SCHEMAS
from tests.runtime.tiny_tokenizer import EOS as EOS_TEXT
from tests.runtime.tiny_tokenizer import tiny_tokenizer
from tests.runtime.tokenizer_kinds import KINDS, SPECIAL, saved

GRAMMARS = [
    Regex("[0-9]{1,3}(-[a-z]+)?"),
    Choice(["alpha", "alphabet", "beta", "é日"]),
    JsonSchema(SCHEMAS["nested"]),
    JsonObject(),
    Lark('start: "(" start? ")" | WORD\nWORD: /[a-z]{1,5}/'),
    Lark('start: "[" <|begin|> start? "]" | <[300-400]> "x" start?'),
]


@pytest.fixture(scope="module")
def tokenizer():
    return grammar_tokenizer()


@pytest.fixture(scope="module")
def library_tokenizer():
    return llguidance.LLTokenizer(TOKENIZER_JSON, n_vocab=VOCAB_SIZE, eos_token=EOS)


def fresh_matcher(library_tokenizer, grammar, path):
    source = grammar.source(llguidance.LLMatcher)
    matcher = llguidance.LLMatcher(library_tokenizer, source, log_level=0)
    assert matcher.try_consume_tokens(list(path)) == len(path)
    return matcher


def tokens_that_a_matcher_takes(matcher):
    """Return the tokens that it takes, tried one by one; of a forced text, its usual spelling."""
    found = [t for t in range(VOCAB_SIZE) if t != EOS and matcher.validate_tokens([t])]
    forced = matcher.compute_ff_tokens()
    assert set(forced[:1]) <= set(found)
    return forced[:1] or found


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: type(grammar).__name__)
def test_masks_are_the_tokens_that_a_fresh_matcher_takes(tokenizer, library_tokenizer, grammar):
    constraint, rng = grammar.bind(tokenizer), np.random.default_rng(5)
    for _ in range(3):
        state, path = constraint.start([0, 1, 2]), []
        for _ in range(12):
            matcher = fresh_matcher(library_tokenizer, grammar, path)
            allowed = allowed_of(constraint, state)
            assert allowed.tolist() == tokens_that_a_matcher_takes(matcher)
            assert constraint.accepts(state).tolist() == [matcher.is_accepting()]
            is_over = matcher.is_accepting() and not len(allowed)
            assert constraint.has_ended(state).tolist() == [is_over]
            if not len(allowed):
                break
            path.append(int(rng.choice(allowed)))
            state = advanced(constraint, state, path[-1:])


def grown_forest(constraint, rng, num_iterations, width):
    """Yield the states and paths of layers: up to three are drafted, then all but some pruned."""
    states, paths = constraint.start([]), [[]]
    for _ in range(num_iterations):
        for _ in range(int(rng.integers(1, 4))):
            masks = constraint.allowed(states).bits
            pairs = [
                (parent, int(token))
                for parent, bits in enumerate(masks)
                for token in rng.permutation(tokens_of(bits))[: int(rng.integers(1, 4))]
            ]
            if not pairs:
                return
            pairs = [pairs[k] for k in rng.permutation(len(pairs))[: 3 * width]]
            parents, tokens = np.array(pairs).T
            states = constraint.advance(states[parents], tokens)
            paths = [[*paths[parent], token] for parent, token in pairs]
            yield states, paths
        kept = rng.permutation(len(states))[:width]
        states, paths = states[kept], [paths[k] for k in kept]


@pytest.mark.parametrize("most_steps", [-1, 0, 3, 32])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: type(grammar).__name__)
def test_every_state_of_a_forest_is_its_paths_alone(
    tokenizer, library_tokenizer, grammar, most_steps, monkeypatch
):
    monkeypatch.setattr("dsbd_ort.constraints.matcher_pool._MOST_STEPS", most_steps)
    constraint, rng = grammar.bind(tokenizer), np.random.default_rng(11)
    seen = []
    while len(seen) < 100:
        for states, paths in grown_forest(constraint, rng, 25, width=4):
            seen.extend(zip(states, paths, strict=True))
    order = rng.permutation(len(seen))[:200]  # long after others have walked on
    states = np.array([seen[k][0] for k in order], dtype=np.object_)
    again = constraint.advance(constraint.start([]).repeat(len(order)), np.zeros(len(order), int))
    assert len(again) == len(order)  # advancing alone computes nothing
    accepts, masks = constraint.accepts(states), constraint.allowed(states).bits
    for index, k in enumerate(order):
        matcher = fresh_matcher(library_tokenizer, grammar, seen[k][1])
        assert tokens_of(masks[index]).tolist() == tokens_of_mask(matcher)
        assert accepts[index] == matcher.is_accepting()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_by_any_number_of_threads(tokenizer, num_threads):
    schema = JsonSchema({"maximum": 1000})
    usual = schema.bind(tokenizer)
    other = schema.bind(grammar_tokenizer(num_threads=num_threads))
    tokens = allowed_of(usual, usual.start([]))
    masks = [
        constraint.allowed(constraint.advance(constraint.start([]).repeat(len(tokens)), tokens))
        for constraint in (usual, other)
    ]
    assert len(tokens) > 1
    assert np.array_equal(masks[0].bits, masks[1].bits)


def tokens_of_mask(matcher):
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32).copy()
    return [token for token in tokens_of(bits) if token != EOS]


def test_masks_after_other_paths_of_the_same_length(tokenizer, library_tokenizer):
    """llguidance 1.9 caches a mask by row and lexer state, also when it goes back."""
    grammar = JsonSchema(SCHEMAS["nested"])
    constraint = grammar.bind(tokenizer)
    before = ids_of('{"who":{"name":"x","tags":[]},"at":[[')
    state = advanced(constraint, constraint.start([]), before)
    for text in ("]", "85", "]", "7,85", "85"):
        path = [token for letter in text for token in ids_of(letter)]
        found = allowed_of(constraint, advanced(constraint, state, path))
        matcher = fresh_matcher(library_tokenizer, grammar, [*before, *path])
        assert found.tolist() == tokens_of_mask(matcher)


def test_matchers_of_a_request_are_few(tokenizer):
    constraint = JsonSchema({"type": "array", "items": {"type": "integer"}}).bind(tokenizer)
    rng = np.random.default_rng(2)
    sizes = [
        (len(states), len(states[0].pool._runners))
        for states, _ in grown_forest(constraint, rng, 120, width=4)
    ]
    assert len(sizes) > 100
    assert max(runners for _, runners in sizes) <= 2 * max(states for states, _ in sizes)
    wide = constraint.start([]).repeat(200)
    states = constraint.advance(wide, np.full(200, ids_of("[")[0]))
    assert len(set(map(bytes, constraint.allowed(states).bits))) == 1
    assert len(states[0].pool._runners) <= MOST_RUNNERS


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_texts_of_a_schema_parse_and_validate(tokenizer, name):
    schema = SCHEMAS[name]
    constraint = JsonSchema(schema).bind(tokenizer)
    rng = np.random.default_rng(len(name))
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for _ in range(15):
        tokens = random_text(constraint, rng)
        assert tokens is not None, "the text did not end"
        text = TOKENIZER.decode(tokens)
        found = json.loads(text)
        validator.validate(found)
        assert json.loads(json.dumps(found)) == found


def test_threads_share_a_constraint(tokenizer):
    constraint = JsonSchema(SCHEMAS["nested"]).bind(tokenizer)

    def text_of(seed):
        return random_text(constraint, np.random.default_rng(seed))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(text_of, range(8))) == list(map(text_of, range(8)))


def test_threads_share_a_request(tokenizer):
    constraint = JsonObject().bind(tokenizer)
    start = constraint.advance(constraint.start([]), np.array(ids_of("{")))
    tokens = allowed_of(constraint, start)

    def masks(_):
        states = constraint.advance(start.repeat(len(tokens)), tokens)
        return constraint.allowed(states).bits

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(masks, range(4)))
    assert all(np.array_equal(bits, found[0]) for bits in found)


@pytest.mark.parametrize("vocab_size", [4001, 4096, 4097, 5000])
@pytest.mark.parametrize("eos", [(EOS,), (0, 1), ()])
def test_vocabularies_of_the_model(tokenizer, vocab_size, eos):
    """The model may have more tokens than the tokenizer, or fewer, and no end of a sequence."""
    usual = Regex("[a-z]+").bind(tokenizer)
    other = Regex("[a-z]+").bind(grammar_tokenizer(vocab_size, eos))
    for tokens in ([], ids_of("abc")):
        masks = other.allowed(advanced(other, other.start([]), tokens)).bits
        assert masks.shape == (1, (vocab_size + 31) // 32) and masks.dtype == np.int32
        expected = allowed_of(usual, advanced(usual, usual.start([]), tokens))
        assert tokens_of(masks[0]).tolist() == [t for t in expected if t < vocab_size]


def test_no_grammar_allows_an_end_of_sequence_token():
    newline = ids_of("\n")[0]
    constraint = Regex("a\n?").bind(grammar_tokenizer(eos=(EOS, newline)))
    state = advanced(constraint, constraint.start([]), ids_of("a"))
    assert newline not in allowed_of(constraint, state)
    assert constraint.accepts(state)[0]


def test_grammars_are_compiled_once(tokenizer):
    made = Regex("once").bind(tokenizer)
    assert Regex("once").bind(tokenizer) is made
    for number in range(MOST_COMPILED):
        Regex(f"x{number}").bind(tokenizer)
    assert Regex("once").bind(tokenizer) is not made
    assert len(tokenizer._compiled) == MOST_COMPILED


def test_a_grammar_that_has_grown_is_compiled_again():
    """Lexer states accumulate over the requests of a grammar, which would fail one day."""
    tokenizer = grammar_tokenizer()
    grammar = Regex("[a-z]*a[a-z]{300}")
    first = grammar.bind(tokenizer)
    path = ids_of("a" * 300)
    for number in range(40):
        if grammar.bind(tokenizer) is not first:
            break
        rng = np.random.default_rng(number)
        letters = [ids_of(letter)[0] for letter in rng.choice(list("abcdef"), size=250)]
        first.allowed(advanced(first, first.start([]), [*letters, *path[:20]]))
        state = first.start([])
        for letter in letters:
            state = advanced(first, state, [letter])
            first.allowed(state)
    assert first.memory.followed > MOST_GRAMMAR_BYTES
    again = grammar.bind(tokenizer)
    assert again is not first and again.memory.followed == 0
    assert grammar.bind(tokenizer) is again


def test_a_lexer_at_its_limit_fails_no_further_request():
    tokenizer = grammar_tokenizer()
    tokenizer._limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=3000)
    grammar = Regex("[a-z]*a[a-z]{300}")
    first = grammar.bind(tokenizer)
    letters = [ids_of(letter)[0] for letter in "abcadeabfa" * 20]
    state = other = advanced(first, first.start([]), letters[1:3])
    with pytest.raises(ConstraintError, match="too many states"):
        for letter in letters:
            state = advanced(first, state, [letter])
            first.allowed(state)
    with pytest.raises(ConstraintError, match="too many states"):  # not "does not allow token"
        first.allowed(advanced(first, other, letters[:5]))
    again = grammar.bind(tokenizer)
    assert again is not first and not again.is_spent
    assert again.allowed(advanced(again, again.start([]), letters[:5])).bits.any()


def test_a_token_that_is_not_allowed_is_refused(tokenizer):
    constraint = Regex("[0-9][a-z]").bind(tokenizer)
    digit, letter = ids_of("5")[0], ids_of("x")[0]
    start = constraint.start([])
    bad = advanced(constraint, start, [digit, digit])
    with pytest.raises(ConstraintError, match=rf"regex .* does not allow token {digit} after 1"):
        constraint.allowed(bad)
    assert letter in allowed_of(constraint, advanced(constraint, start, [digit]))


def test_no_states_have_no_masks(tokenizer):
    constraint = Regex("[0-9]+").bind(tokenizer)
    none = constraint.start([])[:0]
    assert constraint.allowed(none).bits.shape == (0, VOCAB_SIZE // 32)
    assert constraint.accepts(none).shape == constraint.has_ended(none).shape == (0,)


@pytest.mark.parametrize("text", ["{}", "no such file.json", '{"model": {"type": "WordLevel"}}'])
def test_tokenizers_that_grammars_cannot_use(text):
    with pytest.raises(ConstraintError, match="grammars cannot use this tokenizer"):
        GrammarTokenizer(text, vocab_size=100, eos_token_ids=[1])


NAMES = ["<|im_end|>", EOS_TEXT, "<mask>", "<tool>", "[call]"]


@pytest.fixture(scope="module")
def with_names() -> tokenizers.Tokenizer:
    made = tiny_tokenizer()
    made.add_special_tokens(["<|im_end|>", tokenizers.AddedToken("<mask>", lstrip=True)])
    made.add_tokens(["<tool>", "[call]"])
    return made


@pytest.fixture(scope="module")
def bound(with_names: tokenizers.Tokenizer) -> GrammarTokenizer:
    return GrammarTokenizer(
        with_names.to_str(),
        vocab_size=with_names.get_vocab_size() + 3,  # a model may have more
        eos_token_ids=[with_names.token_to_id(EOS_TEXT)],
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_plain_text(with_names, bound, name):
    grammars = [  # of one text or two, and these texts
        (Choice([name]), [name]),
        (Choice([name, f"{name}x"]), [name, f"{name}x"]),
        (Choice([f"a {name}{name} b"]), [f"a {name}{name} b"]),
        (Regex("".join(f"\\x{ord(character):02x}" for character in name)), [name]),
        (JsonSchema({"const": name}), [json.dumps(name)]),
        (JsonSchema({"enum": [name, f"<{name}"]}), [json.dumps(name), json.dumps(f"<{name}")]),
    ]
    for grammar, texts in grammars:
        tokens = random_text(grammar.bind(bound), np.random.default_rng(1))
        assert with_names.decode(tokens, skip_special_tokens=True) in texts, grammar


def test_a_lark_grammar_may_ask_for_the_token(with_names, bound):
    grammar = Lark('start: <|im_end|> "<|im_end|>"')
    tokens = random_text(grammar.bind(bound), np.random.default_rng(1))
    assert tokens[0] == with_names.token_to_id("<|im_end|>") not in tokens[1:]
    assert with_names.decode(tokens) == "<|im_end|>"


READ = ["tiny_tokenizer", "byte_level_bpe", "byte_fallback_bpe", "llama_2", "unigram"]


@pytest.mark.parametrize("kind", READ)
def test_grammars_see_the_bytes_that_a_token_adds(tmp_path, kind):
    backend = KINDS[kind]()
    tokenizer, size = saved(backend, tmp_path), backend.get_vocab_size()
    ends = [] if (end := backend.token_to_id(SPECIAL)) is None else [end]
    read = GrammarTokenizer(backend.to_str(), vocab_size=size, eos_token_ids=ends)
    special = {t for t, added in backend.get_added_tokens_decoder().items() if added.special}
    for token in set(range(size)) - special:
        content = tokenizer.bytes_of(token)
        if content != b"\xff":  # which the library shows of no token
            assert read._tokenizer.decode_bytes([token]) == content
