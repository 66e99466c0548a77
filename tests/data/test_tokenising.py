"""From rows to token ids: the chat template, room for the completion, and what supervised fine-tuning trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from areal_tasks.data.datasets import Row, load_rows
from areal_tasks.data.scratch import character_tokenizer
from areal_tasks.data.tokenising import check_in_vocabulary, render_prompts, sft_examples
from areal_tasks.stages.preflight import check_chat
from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from schemas.recipe.sections import Data
from schemas.tables import PROMPTS

ROWS = [Row(0, "1+2=", "3"), Row(1, "9+9+9+9=", "36"), Row(2, "5+5=", "10")]
CHAT = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("0123456789+=", 32)


@pytest.fixture
def chatty() -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz[]:>+=0123456789 ", 64)
    tokenizer.chat_template = CHAT
    return tokenizer


def data(**changes: object) -> Data:
    return Data.model_validate({"source": "sums://4", **changes})


def test_prompts_keep_their_row_and_their_text(tokenizer: PreTrainedTokenizerFast) -> None:
    table = render_prompts(ROWS, data(), tokenizer, 16, 4)
    assert table.schema.equals(PROMPTS)
    assert table.column("prompt").to_pylist() == [row.prompt for row in ROWS]
    assert table.column("num_tokens").to_pylist() == [4, 8, 4]
    assert [tokenizer.decode(ids) for ids in table.column("input_ids").to_pylist()] == [row.prompt for row in ROWS]


def test_the_template_wraps_the_prompt_and_formats_nothing_else() -> None:
    curly = character_tokenizer("abqx{}: =", 64)
    table = render_prompts([Row(0, "ab", "1")], data(template="q: {x} {prompt} ="), curly, 64, 4)
    assert table.column("prompt").to_pylist() == ["q: {x} ab ="]


def test_the_chat_template_is_applied_with_the_system_message(chatty: PreTrainedTokenizerFast) -> None:
    table = render_prompts(ROWS[:1], data(chat=True, system="add"), chatty, 64, 4)
    assert chatty.decode(table.column("input_ids")[0].as_py()) == "[system:add][user:1+2=]>"
    assert table.column("prompt").to_pylist() == ["1+2="]  # the text a person reads is the message


def test_chat_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"data\.chat: .*no chat template"):
        render_prompts(ROWS, data(chat=True), tokenizer, 16, 4)


def test_a_prompt_that_leaves_no_room_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(render_prompts(ROWS, data(), tokenizer, 12, 4)) == 3
    with pytest.raises(
        UserError, match=r"row 1 .from 0. has 8 tokens, which with room for 4 more exceeds .* 11; 1 prompts"
    ):
        render_prompts(ROWS, data(), tokenizer, 11, 4)


def test_or_it_is_dropped_and_the_others_keep_their_numbers(tokenizer: PreTrainedTokenizerFast) -> None:
    table = render_prompts(ROWS, data(on_long_prompt="drop"), tokenizer, 11, 4)
    assert table.column("prompt_id").to_pylist() == [0, 2]
    with pytest.raises(UserError, match="every one of 3 prompts is too long"):
        render_prompts(ROWS, data(on_long_prompt="drop"), tokenizer, 8, 6)


def test_room_for_the_rows_own_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    table = render_prompts(ROWS, data(on_long_prompt="drop"), tokenizer, 6, None)
    assert table.column("prompt_id").to_pylist() == [0]  # 4 + "3" + end is 6; 4 + "10" + end is 7


def test_unknown_characters_and_empty_prompts_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"row 7 .from 0., '1\*2=', has characters outside"):
        render_prompts([*ROWS, Row(7, "1*2=", "2")], data(), tokenizer, 16, 4)
    with pytest.raises(UserError, match=r"row 8 .* is empty"):
        render_prompts([Row(8, "", "2")], data(), tokenizer, 16, 4)


@pytest.mark.parametrize("chat", [False, True])
def test_an_unknown_token_that_also_begins_prompts_is_no_unknown_character_there(chat: bool) -> None:
    """As in OLMo-2's tokenizer: `<|endoftext|>` is its beginning, its end and its unknown token."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz[]:>+=0123456789 ", 64)
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.unk_token
    tokenizer.chat_template = "{{ bos_token }}" + CHAT
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.unk_token} $0", special_tokens=[(tokenizer.unk_token, tokenizer.unk_token_id)]
    )
    named = Row(3, f"{tokenizer.unk_token}1=", "1")
    ids = render_prompts([*ROWS, named], data(chat=chat), tokenizer, 64, 4)["input_ids"].to_pylist()
    assert [row.count(tokenizer.unk_token_id) for row in ids] == [1, 1, 1, 2]
    assert all(row[0] == tokenizer.unk_token_id for row in ids)
    with pytest.raises(UserError, match="has characters outside"):
        render_prompts([*ROWS, Row(7, "1*2=", "2")], data(chat=chat), tokenizer, 64, 4)


def test_demonstrations_train_the_answer_and_its_end_only(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = render_prompts(ROWS, data(), tokenizer, 16, None)
    for row, example in zip(ROWS, sft_examples(prompts, data(), tokenizer), strict=True):
        trained = [token for token, mask in zip(example.input_ids, example.loss_mask, strict=True) if mask]
        assert trained[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(trained[:-1]) == row.answer == example.completion
        assert example.loss_mask == [False] * len(row.prompt) + [True] * len(trained)
        assert tokenizer.decode(example.input_ids[: len(row.prompt)]) == row.prompt == example.prompt


def test_demonstrations_begin_with_what_generation_begins_with(chatty: PreTrainedTokenizerFast) -> None:
    prompts = render_prompts(ROWS, data(chat=True), chatty, 64, None)
    for ids, example in zip(
        prompts.column("input_ids").to_pylist(), sft_examples(prompts, data(chat=True), chatty), strict=True
    ):
        assert example.input_ids[: len(ids)] == ids
        assert not any(example.loss_mask[: len(ids)])


WORDS = st.text(alphabet="ab= \n", max_size=6)


@given(WORDS.filter(str.strip), WORDS, st.sampled_from(["always", "first", "never"]), st.booleans(), st.data())
def test_an_answer_continues_its_prompt_as_text_does(
    prompt: str, answer: str, scheme: str, split: bool, drawn: st.DataObject
) -> None:
    """SentencePiece's tokenizers, which put a blank before what begins a text: none comes between prompt and answer."""
    pieces = drawn.draw(st.sets(st.text(alphabet="ab=\u2581", min_size=2, max_size=3)), label="merged pieces")
    vocabulary = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        *((c, -3.0) for c in "ab=\u2581\n"),
        *((p, -2.0) for p in sorted(pieces)),
    ]
    backend = Tokenizer(Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer = Metaspace(prepend_scheme=scheme, split=split)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    prompts = render_prompts([Row(0, prompt, answer)], data(), tokenizer, 64, None)
    [example] = sft_examples(prompts, data(), tokenizer)
    tokens = [backend.id_to_token(i) for i in example.input_ids[:-1]]
    lead = "" if scheme == "never" or prompt.startswith(" ") else " "  # what the tokenizer itself puts first
    assert "".join(tokens).replace("\u2581", " ") == lead + prompt + answer


def test_a_tokenizer_without_an_end_cannot_be_tuned(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = render_prompts(ROWS, data(), tokenizer, 16, 4)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        sft_examples(prompts, data(), tokenizer)


@pytest.mark.skipif(
    not (os.environ.get("AREAL_TEST_MODEL") and os.environ.get("AREAL_TEST_GSM8K")),
    reason="set AREAL_TEST_MODEL to a chat model's folder and AREAL_TEST_GSM8K to a folder with train.jsonl",
)
def test_gsm8k_with_a_real_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(os.environ["AREAL_TEST_MODEL"]))
    gsm8k = data(source=f"{os.environ['AREAL_TEST_GSM8K']}/{{split}}.jsonl", chat=True, limit=50)
    rows = load_rows(gsm8k, "train")
    prompts = render_prompts(rows, gsm8k, tokenizer, 1024, None)
    for row, example in zip(rows, sft_examples(prompts, gsm8k, tokenizer), strict=True):
        trained = [token for token, mask in zip(example.input_ids, example.loss_mask, strict=True) if mask]
        assert row.prompt in tokenizer.decode(example.input_ids)
        assert tokenizer.decode(trained) == row.answer + tokenizer.eos_token


ADDED = st.sampled_from(["", "<bos>", "<bos> <bos>"])


@given(
    ADDED,
    st.sampled_from(["", "<eos>", "<eos> <eos>", "= <eos>"]),
    st.sampled_from(["{prompt}", "{prompt}<eos>", "<bos>{prompt}"]),
)
def test_nothing_is_added_behind_a_prompt_but_what_the_template_says(before: str, behind: str, template: str) -> None:
    """A tokenizer may put an end of sequence behind every text; a completion cannot follow one."""
    plain, adding = (character_tokenizer("0123456789+=", 32) for _ in range(2))
    special = [(token, plain.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>", "=")]
    processor = TemplateProcessing(single=f"{before} $A {behind}".strip(), special_tokens=special)
    adding.backend_tokenizer.post_processor = processor
    found, bare = (
        render_prompts(ROWS, data(template=template), one, 32, 4).column("input_ids").to_pylist()
        for one in (adding, plain)
    )
    first = plain.convert_tokens_to_ids(before.split())
    assert found == [[*first, *ids] for ids in bare]
    assert all((ids[-1] == plain.eos_token_id) == template.endswith("<eos>") for ids in found)


RAISING = {
    "{{ raise_exception('System role not supported') }}": "System role not supported",
    "{{ messages[0].content.nothing.more }}": "has no attribute 'nothing'",
    "{{ messages[0].content + 1 }}": "can only concatenate str",
    "{% for m in messages %}": "Encountered unknown tag 'endif'",
}


@pytest.mark.parametrize("template", RAISING)
@pytest.mark.parametrize("system", ["", "be brief"])
def test_a_chat_template_that_raises_is_one_line(chatty: PreTrainedTokenizerFast, template: str, system: str) -> None:
    chatty.chat_template = "{% if messages[-1].content == 'b' %}" + template + "{% endif %}"
    rows = [Row(0, "a", "1"), Row(7, "b", "2")]
    with pytest.raises(UserError) as refused:
        render_prompts(rows, data(chat=True, system=system), chatty, 64, 4)
    message = str(refused.value)
    assert RAISING[template] in message and "set data.chat to false" in message and "\n" not in message
    assert ("data.system" in message) == bool(system)
    assert "row 7" in message or "unknown tag" in message  # a template that is none refuses every row


def test_a_chat_template_is_tried_before_the_start(chatty: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    chatty.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    chatty.save_pretrained(tmp_path)
    changes = [f"model.path={tmp_path}", "model.warm_start=", "data.chat=true"]
    check_chat(load_recipe("quickstart", changes))
    with pytest.raises(UserError, match=r"\(no system\); clear data\.system"):
        check_chat(load_recipe("quickstart", [*changes, "data.system=be brief"]))


@given(st.integers(0, 40), st.booleans())
def test_tokens_that_the_model_lacks_are_named_with_their_row(vocabulary: int, answers: bool) -> None:
    tokenizer = character_tokenizer("0123456789+=", 16)
    table = render_prompts(ROWS, data(), tokenizer, 16, None)
    ids = table["input_ids"].to_pylist()
    texts = [example.input_ids for example in sft_examples(table, data(), tokenizer)]
    lacking = [row for row, own in enumerate(texts if answers else ids) if max(own) >= vocabulary]
    if not lacking:
        check_in_vocabulary(table, data(), tokenizer, vocabulary, answers)
        return
    with pytest.raises(UserError, match=rf"row {lacking[0]} .* the model's vocabulary ends at {vocabulary - 1}:"):
        check_in_vocabulary(table, data(), tokenizer, vocabulary, answers)
