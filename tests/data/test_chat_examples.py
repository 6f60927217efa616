import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from composer_packing.data.chat_examples import ExampleTokenizer
from composer_packing.data.tokenizer import train_tokenizer

TEXTS = [
    "What is two and two? Four is two and two.\n\n  Spaces, and\ttabs.",
    "<|user|>\nWhat?\n<|assistant|>\nThat.\n<|system|>\nThis.",
    "日本語のテキスト and Ünïcödé.",
] * 3
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} ;{% endfor %}"


def fast(tokenizer: Tokenizer, **special: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def with_brackets(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    names = ("pad", "unk", "cls", "sep", "mask")
    return fast(tokenizer, **{f"{name}_token": f"[{name.upper()}]" for name in names})


def without_post_processor(**special: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that adds nothing to a text."""
    bare = Tokenizer.from_str(BYTES.to_str())
    bare.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast(bare, **special)


def of_words(words: Sequence[str], **special: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each of these words. It loses upper case, and the spaces between words."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast(tokenizer, unk_token="[UNK]", **special)


def of_merges(merges: Sequence[tuple[str, str]], **special: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that joins them by these merges, also across words and lines."""
    vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {first + second: len(vocab) + number for number, (first, second) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer, **special)


def trained(tokenizer: PreTrainedTokenizerFast, example: Mapping[str, Any], **settings: Any) -> list[str]:
    """The tokens of one example that train."""
    (result,) = ExampleTokenizer(tokenizer, **settings)([example])
    return cast("list[str]", tokenizer.convert_ids_to_tokens(result["input_ids"][result["loss_mask"] == 1].tolist()))


def text_of(tokenizer: PreTrainedTokenizerFast, example: Mapping[str, Any], **settings: Any) -> str:
    """The tokens of one example that train, decoded."""
    (result,) = ExampleTokenizer(tokenizer, **settings)([example])
    return decode(tokenizer, result["input_ids"][result["loss_mask"] == 1])


def decode(tokenizer: PreTrainedTokenizerFast, ids: Any) -> str:
    return str(tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))


BYTES = train_tokenizer(TEXTS, 420)
BRACKETS = with_brackets(BYTES)

pieces = st.lists(
    st.sampled_from([" ", "\n", "\t", "a", "What", " two", "?", "é", "日本", "😀", "e\u0301", "\u200d", "<|user|>"])
    | st.text(max_size=3),
    max_size=6,
).map("".join)


def ends_in_bytes(tokens: Sequence[str]) -> list[int]:
    """The offset in bytes at which each token of a byte-level BPE ends. Every character of a token's name is a byte."""
    return list(itertools.accumulate(len(token) for token in tokens))


@given(st.lists(st.tuples(pieces, pieces), max_size=4))
def test_a_token_trains_if_it_ends_in_the_response_and_the_sep_after_it_too(
    given: list[tuple[str, str]],
) -> None:
    results = ExampleTokenizer(BRACKETS)([{"prompt": prompt, "response": response} for prompt, response in given])
    assert len(results) == len(given)
    for (prompt, response), result in zip(given, results, strict=True):
        assert result["input_ids"].dtype == np.int64
        assert result["loss_mask"].dtype == np.uint8
        first, *tokens, last = BRACKETS.convert_ids_to_tokens(result["input_ids"].tolist())
        assert (first, last) == ("[CLS]", "[SEP]")
        in_response = [int(end > len(prompt.encode())) for end in ends_in_bytes(tokens)]
        assert result["loss_mask"].tolist() == [0, *in_response, int(response != "")]


@given(pieces, pieces)
def test_tokens_that_train_spell_the_response_and_all_tokens_the_text(prompt: str, response: str) -> None:
    (result,) = ExampleTokenizer(BRACKETS)([{"prompt": prompt, "response": response}])
    ids, mask = result["input_ids"], result["loss_mask"] == 1
    assert decode(BRACKETS, ids) == f"[CLS]{prompt}{response}[SEP]"
    assert ids.tolist() == BRACKETS(prompt + response)["input_ids"]
    assert np.diff(mask.astype(int)).min() >= 0, "after a token that trains, all train"
    if response:
        assert decode(BRACKETS, ids[mask]).endswith(response + "[SEP]")
        without_the_first = decode(BRACKETS, ids[mask][1:]).lstrip("\ufffd")
        assert f"{response}[SEP]".endswith(without_the_first), "the first alone may hold some of the prompt"
    else:
        assert not mask.any()


roles = st.sampled_from(["system", "user", "assistant", "tool"])
chats = st.lists(st.fixed_dictionaries({"role": roles, "content": pieces}), min_size=1, max_size=5)


@given(chats, st.sets(roles, min_size=1), st.booleans())
def test_the_contents_of_some_roles_of_a_chat_train_with_their_ends(
    messages: list[dict[str, str]], train_roles: set[str], train_headers: bool
) -> None:
    parts = [("[CLS]", train_headers and messages[0]["role"] in train_roles and messages[0]["content"] != "")]
    for message in messages:
        of_role = message["role"] in train_roles and message["content"] != ""
        parts += [(f"<|{message['role']}|>\n", train_headers and of_role), (message["content"] + "[SEP]\n", of_role)]
    trains = [train for text, train in parts for _ in text.encode()]

    (result,) = ExampleTokenizer(BRACKETS, None, sorted(train_roles), train_headers)([{"messages": messages}])
    tokens = BRACKETS.convert_ids_to_tokens(result["input_ids"].tolist())
    assert decode(BRACKETS, result["input_ids"]) == "".join(text for text, _ in parts)
    ends = ends_in_bytes(tokens)
    assert result["loss_mask"].tolist() == [
        int(any(trains[start:end])) for start, end in zip([0, *ends], ends, strict=False)
    ]


@given(
    st.permutations([*CHAT, {"prompt": "Two ", "response": "and"}, {"prompt": "a", "response": ""}, {"prompt": "b"}])
)
def test_examples_of_both_forms_come_in_order_and_are_as_each_is_alone(mixed: list[dict[str, str]]) -> None:
    examples: list[dict[str, Any]] = [
        {"messages": [given]} if "role" in given else {"response": "c"} | given for given in mixed
    ]
    tokenizer = ExampleTokenizer(BRACKETS, train_roles=("user", "assistant"))
    for example, result in zip(examples, tokenizer(examples), strict=True):
        (alone,) = tokenizer([example])
        assert {key: array.tolist() for key, array in result.items()} == {
            key: array.tolist() for key, array in alone.items()
        }


def test_no_examples_give_none() -> None:
    assert ExampleTokenizer(BRACKETS)([]) == []


def test_the_picture_in_the_docstring_of_the_module_is_what_happens() -> None:
    example = {"messages": CHAT[1:3]}
    (result,) = ExampleTokenizer(BRACKETS)([example])
    assert decode(BRACKETS, result["input_ids"]) == "[CLS]<|user|>\nTwo and two?[SEP]\n<|assistant|>\nFour.[SEP]\n"
    assert text_of(BRACKETS, example) == "Four.[SEP]\n"


def test_all_turns_of_a_role_train_and_their_headers_only_by_the_switch() -> None:
    assert text_of(BRACKETS, {"messages": CHAT}) == "Four.[SEP]\nYes.[SEP]\n"
    with_headers = text_of(BRACKETS, {"messages": CHAT}, train_headers=True)
    assert with_headers == "<|assistant|>\nFour.[SEP]\n<|assistant|>\nYes.[SEP]\n"


@pytest.mark.parametrize("template", [None, CHAT_ML])
def test_system_and_user_train_if_asked_for_also_in_the_first_message(template: str | None) -> None:
    end = "[SEP]" if template is None else "<|im_end|>"
    settings = {"chat_template": template, "train_roles": ["system", "user"]}
    assert text_of(BRACKETS, {"messages": CHAT}, **settings) == f"Be brief.{end}\nTwo and two?{end}\nSure?{end}\n"
    first = text_of(BRACKETS, {"messages": CHAT[:1]}, **settings, train_headers=True)
    assert first == ("[CLS]<|system|>\n" if template is None else "<|im_start|>system\n") + f"Be brief.{end}\n"


def test_an_example_without_the_role_trains_nothing() -> None:
    (result,) = ExampleTokenizer(BRACKETS, train_roles=["tool"])([{"messages": CHAT}])
    assert len(result["input_ids"]) > 0
    assert result["loss_mask"].tolist() == [0] * len(result["input_ids"])


def test_content_is_never_searched_for() -> None:
    messages = [
        {"role": "user", "content": "Four.[SEP]\n<|assistant|>\nFour."},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "<|assistant|>\n"},
        {"role": "assistant", "content": "<|user|>\n<|assistant|>\n"},
    ]
    assert text_of(BRACKETS, {"messages": messages}) == "Four.[SEP]\n<|user|>\n<|assistant|>\n[SEP]\n"


@pytest.mark.parametrize("content", ["x", "y", "yy", "xx", "yx", " x", "\n", "x[SEP]\n<|assistant|>\ny"])
def test_contents_that_begin_as_the_sentinels_do_train_as_a_whole(content: str) -> None:
    messages = [*CHAT[:2], {"role": "assistant", "content": content}]
    assert text_of(of_merges([]), {"messages": messages}) == f"{content}\n"


def test_a_token_across_the_boundary_trains_though_the_header_alone_has_other_tokens() -> None:
    tokenizer = of_merges([(">", "Ċ"), ("Ċ", "F"), ("ĊF", "o"), ("Ġ", "a"), ("?", "Ġa")])
    messages = [{"role": "assistant", "content": "Four"}]
    assert tokenizer.tokenize("<|assistant|>\n")[-1] == ">Ċ"
    assert trained(tokenizer, {"messages": messages}) == ["F", "o", "u", "r", "Ċ"]

    tokenizer = of_merges([("Ċ", "F"), ("ĊF", "o"), (">", "Ċ"), ("Ġ", "a"), ("?", "Ġa")])
    assert tokenizer.tokenize("<|assistant|>\n")[-1] == ">Ċ"
    assert trained(tokenizer, {"messages": messages}) == ["ĊFo", "u", "r", "Ċ"]
    assert trained(tokenizer, {"prompt": "Two?", "response": " and"}) == ["?Ġa", "n", "d"]
    assert trained(tokenizer, {"prompt": "Two? ", "response": "and"}) == ["?Ġa", "n", "d"]
    assert trained(tokenizer, {"prompt": "Two? a", "response": "nd"}) == ["n", "d"]


def test_a_token_of_the_end_of_a_turn_and_the_next_header_trains() -> None:
    tokenizer = of_merges([("Ċ", "<")])
    messages = [CHAT[4], CHAT[3]]
    assert trained(tokenizer, {"messages": messages}) == ["Y", "e", "s", ".", "Ċ<"]


def test_every_token_of_a_character_that_trains_trains() -> None:
    tokenizer = of_merges([("ð", "Ł"), ("Ġ", "ðŁ")])
    assert tokenizer.tokenize(" 😀") == ["ĠðŁ", "ĺ", "Ģ"]
    assert trained(tokenizer, {"prompt": "a ", "response": "😀b"}) == ["ĠðŁ", "ĺ", "Ģ", "b"]
    assert trained(tokenizer, {"prompt": "a 😀", "response": "b"}) == ["b"]


def test_bytes_that_a_vocabulary_falls_back_to_train_with_their_character() -> None:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "<0xF0>": 4, "<0x9F>": 5, "<0x98>": 6, "<0x80>": 7}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    for metaspace in (False, True):
        tokenizer = Tokenizer(model)
        if metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        wrapped = fast(tokenizer)
        assert trained(wrapped, {"prompt": "a", "response": " 😀a"}) == ["▁", *list(vocab)[4:], "a"]
        assert trained(wrapped, {"prompt": "a 😀", "response": "a"}) == ["a"]
        assert trained(wrapped, {"prompt": "a ", "response": "a"}) == ["▁a"]


def test_a_tokenizer_that_trims_spaces_trains_those_of_the_response_and_no_others() -> None:
    trims = Tokenizer.from_str(BYTES.to_str())
    trims.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2), trim_offsets=True)
    tokenizer = with_brackets(trims)
    for prompt, response in (("two", " "), ("two ", " "), ("two  ", "  is \n  that"), ("a", "   b  "), ("a ", "")):
        expected = trained(BRACKETS, {"prompt": prompt, "response": response})
        assert trained(tokenizer, {"prompt": prompt, "response": response}) == expected, (prompt, response)


def test_words_whose_case_and_spaces_are_lost_train_by_their_position() -> None:
    tokenizer = of_words(["[UNK]", "two", "and", "four"])
    assert trained(tokenizer, {"prompt": "TWO and  ", "response": "  Two FOUR more "}) == ["two", "four", "[UNK]"]
    assert trained(tokenizer, {"prompt": "two ", "response": "  "}) == []
    chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": " FOUR "}]
    template = "{% for m in messages %} {{ m.role }} {{ m.content }} and {% endfor %}"
    assert trained(tokenizer, {"messages": chat}, chat_template=template) == ["four", "and"]


def test_a_text_without_a_token_trains_nothing_and_gets_no_eos() -> None:
    words = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer = of_words(words, eos_token="[SEP]")
    (result,) = ExampleTokenizer(tokenizer)([{"prompt": "", "response": "  "}])
    assert result["input_ids"].tolist() == result["loss_mask"].tolist() == []
    tokenizer.backend_tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    (result,) = ExampleTokenizer(tokenizer)([{"prompt": " ", "response": " "}])
    assert result["input_ids"].tolist() == [1, 2]
    assert result["loss_mask"].tolist() == [0, 0]


def test_an_empty_message_trains_nothing() -> None:
    for empty in (None, ""):
        messages = [CHAT[1], {"role": "assistant", "content": empty, "name": "a"}]
        for train_headers in (False, True):
            assert text_of(BRACKETS, {"messages": messages}, train_headers=train_headers) == ""
        more = {"messages": [*messages, *CHAT[1:3]]}
        assert text_of(BRACKETS, more) == "Four.[SEP]\n"


def test_what_the_template_derives_from_a_content_counts_as_content() -> None:
    template = "{% for m in messages %}({{ m.content | length }}):{{ m.content }};{% endfor %}"
    for answer in ("a", "bb", "ccc"):
        messages = [CHAT[1], {"role": "assistant", "content": answer}]
        assert text_of(of_merges([]), {"messages": messages}, chat_template=template) == f"{len(answer)}):{answer};"


@pytest.mark.parametrize(
    "more", [{"tools": [{"type": "function", "function": {"name": "add"}}]}, {}], ids=["tools", "tool_calls"]
)
def test_the_default_template_refuses_tools_instead_of_leaving_them_out(more: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": None} | ({} if more else {"tool_calls": [{"name": "add"}]})
    with pytest.raises(ValueError, match="the default template knows no tools; give a chat_template that does"):
        ExampleTokenizer(BRACKETS)([{"messages": [CHAT[1], answer if not more else CHAT[2]], **more}])


def test_the_sep_that_the_tokenizer_adds_trains_and_the_cls_does_not() -> None:
    assert trained(BRACKETS, {"prompt": "", "response": "?"}) == ["?", "[SEP]"]
    assert trained(BRACKETS, {"prompt": "two", "response": " and"}) == ["Ġand", "[SEP]"]


def test_an_empty_response_trains_nothing_and_gets_no_eos() -> None:
    for tokenizer in (BRACKETS, without_post_processor(eos_token="[SEP]")):
        for prompt in ("two", ""):
            (result,) = ExampleTokenizer(tokenizer)([{"prompt": prompt, "response": ""}])
            assert result["input_ids"].tolist() == tokenizer(prompt)["input_ids"]
            assert result["loss_mask"].tolist() == [0] * len(result["input_ids"])


def test_an_eos_is_added_to_a_response_if_the_tokenizer_adds_none_and_it_trains() -> None:
    tokenizer = without_post_processor(eos_token="[SEP]")
    (result,) = ExampleTokenizer(tokenizer)([{"prompt": "two", "response": " and"}])
    assert decode(tokenizer, result["input_ids"]) == "two and[SEP]"
    assert result["input_ids"].dtype == np.int64
    assert result["loss_mask"].dtype == np.uint8
    assert result["loss_mask"].tolist() == [0] * (len(result["input_ids"]) - 2) + [1, 1]


def test_no_eos_is_added_after_a_sep_or_a_chat_or_by_a_tokenizer_without_one() -> None:
    both = fast(BYTES, eos_token="[MASK]", cls_token="[CLS]", sep_token="[SEP]")
    assert trained(both, {"prompt": "two", "response": " and"}) == ["Ġand", "[SEP]"]
    eos = without_post_processor(eos_token="[SEP]")
    assert trained(eos, {"messages": CHAT[1:3]}, chat_template=STRIPS)[-2:] == ["Ġ", ";"]
    neither = without_post_processor()
    assert trained(neither, {"prompt": "two", "response": " and"}) == ["Ġand"]


def test_an_eos_is_added_if_the_tokenizer_adds_a_token_only_before_the_text() -> None:
    before = Tokenizer.from_str(BYTES.to_str())
    before.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    tokenizer = fast(before, bos_token="[CLS]", eos_token="[SEP]")
    (result,) = ExampleTokenizer(tokenizer)([{"prompt": "", "response": "?"}])
    assert tokenizer.convert_ids_to_tokens(result["input_ids"].tolist()) == ["[CLS]", "?", "[SEP]"]
    assert result["loss_mask"].tolist() == [0, 1, 1]


def test_special_tokens_written_in_a_text_are_text() -> None:
    assert text_of(BRACKETS, {"prompt": "[CLS]a[SEP]", "response": "[CLS]b[SEP]"}) == "[CLS]b[SEP][SEP]"
    tokenizer = without_post_processor()
    tokenizer.add_tokens([AddedToken("<end>", lstrip=True, special=True)])
    assert trained(tokenizer, {"prompt": "two  ", "response": "<end>"}) == ["<end>"]


def test_a_long_text_is_not_cut_and_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    cuts = Tokenizer.from_str(BYTES.to_str())
    cuts.enable_truncation(4)
    cuts.enable_padding(length=64)
    tokenizer = fast(cuts, model_max_length=4)
    assert text_of(tokenizer, {"prompt": "two " * 9, "response": "and" * 9}) == " and" + "and" * 8 + "[SEP]"
    assert caplog.text == ""


def test_a_given_template_comes_before_the_tokenizers_own() -> None:
    tokenizer = of_merges([])
    tokenizer.chat_template = CHAT_ML
    assert text_of(tokenizer, {"messages": CHAT}) == "Four.<|im_end|>\nYes.<|im_end|>\n"
    assert text_of(tokenizer, {"messages": CHAT}, chat_template=STRIPS) == "Four. ;Yes. ;"


def test_the_default_template_ends_a_turn_by_eos_or_else_sep_or_else_a_new_line() -> None:
    assert text_of(BRACKETS, {"messages": CHAT[:3]}) == "Four.[SEP]\n"
    both = without_post_processor(eos_token="[MASK]", sep_token="[SEP]", bos_token="[PAD]", cls_token="[CLS]")
    assert text_of(both, {"messages": CHAT[:3]}) == "Four.[MASK]\n"
    (result,) = ExampleTokenizer(both)([{"messages": CHAT[:3]}])
    assert decode(both, result["input_ids"]).startswith("[PAD]<|system|>\nBe brief.[MASK]\n<|user|>\n")
    neither = without_post_processor()
    assert text_of(neither, {"messages": CHAT[:3]}) == "Four.\n"
    (result,) = ExampleTokenizer(neither)([{"messages": CHAT[:3]}])
    assert decode(neither, result["input_ids"]).startswith("<|system|>\nBe brief.\n<|user|>\n")


@pytest.mark.parametrize("content", ["Four.", "  Four.\n ", "\n\nFour."])
def test_what_a_template_leaves_of_a_content_that_it_strips_trains(content: str) -> None:
    messages = [*CHAT[:2], {"role": "assistant", "content": content}, {"role": "user", "content": " x "}]
    assert text_of(without_post_processor(), {"messages": messages}, chat_template=STRIPS) == " Four. ;"
    assert text_of(of_merges([]), {"messages": messages}, chat_template=STRIPS) == "Four. ;"


def test_a_content_that_the_template_writes_twice_trains_both_times_and_between() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{{ m.content }};{% endfor %}"
    assert text_of(of_merges([]), {"messages": CHAT[1:]}, chat_template=template) == "Four.|Four.;Yes.|Yes.;"


def test_a_system_prompt_that_is_put_in_the_first_question_is_header() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{% set system = '<' ~ messages[0].content ~ '>' %}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ system if loop.first }}{{ m.content }}[/INST]"
        "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    settings: dict[str, Any] = {"chat_template": template}
    assert text_of(of_merges([]), {"messages": CHAT}, **settings) == "Four.;Yes.;"
    settings["train_roles"] = ["user"]
    assert text_of(of_merges([]), {"messages": CHAT}, **settings) == "Two and two?[/INST]Sure?[/INST]"


def test_an_empty_think_block_is_header_and_the_thoughts_of_a_message_train() -> None:
    template = "{% for m in messages %}<{{ m.role }}><think>{{ m.thoughts }}</think>{{ m.content }};{% endfor %}"
    assert text_of(of_merges([]), {"messages": CHAT}, chat_template=template) == "Four.;Yes.;"
    split = (
        "{% for m in messages %}{% set parts = ('|' ~ m.content).split('|') %}"
        "<{{ m.role }}><think>{{ parts[-2] }}</think>{{ parts[-1] }};{% endfor %}"
    )
    messages = [CHAT[1], {"role": "assistant", "content": "Add.|Four."}, CHAT[3], CHAT[4]]
    assert text_of(of_merges([]), {"messages": messages}, chat_template=split) == "Add.</think>Four.;Yes.;"


def test_a_template_that_renders_tool_calls_instead_of_content_trains_them() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    messages = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]
    assert text_of(of_merges([]), {"messages": messages}, chat_template=template) == '[{"name": "add"}];'


def test_other_keys_of_a_message_reach_the_template_and_are_header() -> None:
    template = "{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.content }};{% endfor %}"
    messages = [message | {"name": f"n{index}"} for index, message in enumerate(CHAT)]
    assert text_of(of_merges([]), {"messages": messages}, chat_template=template) == "Four.;Yes.;"


def test_a_chat_is_rendered_again_only_for_turns_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []
    original = BRACKETS.apply_chat_template

    def counting(messages: Any, **settings: Any) -> Any:
        rendered.append(len(messages))
        return original(messages, **settings)

    monkeypatch.setattr(BRACKETS, "apply_chat_template", counting)
    for train_roles, headers, expected in (
        (["tool"], False, [5]),
        (["system"], False, [5, 1, 1, 1]),
        (["assistant"], False, [5, 2, 3, 3, 3, 4, 5, 5]),
        (["assistant"], True, [5, 2, 3, 4]),
    ):
        rendered.clear()
        ExampleTokenizer(BRACKETS, train_roles=train_roles, train_headers=headers)([{"messages": CHAT}])
        assert rendered == expected


GOOD = {"prompt": "a", "response": "b"}
LONG = "long " * 50


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        ("text", TypeError, "must be a mapping, such as .*; got str: 'text'"),
        ([GOOD], TypeError, "must be a mapping, such as .*; got list: "),
        ({}, ValueError, r"must have prompt and response, or else messages; got dict: \{\}"),
        ({"prompt": LONG}, ValueError, "must have prompt and response, or else messages; got dict: {'prompt': 'long"),
        (GOOD | {"messages": CHAT}, ValueError, "must have prompt and response, or else messages; got"),
        ({"prompt": "a", "messages": CHAT}, ValueError, "must have prompt and response, or else messages; got"),
        ({"prompt": 7, "response": "b"}, TypeError, "'prompt' must be a string; got int: 7"),
        ({"prompt": "a", "response": [LONG]}, TypeError, "'response' must be a string; got list: "),
        ({"messages": LONG}, TypeError, "'messages' must be a non-empty list of {'role': str, .*; got str: 'long"),
        ({"messages": []}, TypeError, r"'messages' must be a non-empty list of .*; got list: \[\]"),
        ({"messages": ["a"]}, TypeError, r"messages\[0\] must be {'role': str, 'content': str}; got str: 'a'"),
        ({"messages": [CHAT[0], {"role": "user"}]}, TypeError, r"messages\[1\] must be .*; got dict: {'role': 'user'}"),
        ({"messages": [{"content": LONG}]}, TypeError, r"messages\[0\] must be .*; got dict: {'content': 'long"),
        ({"messages": [{"role": 1, "content": "a"}]}, TypeError, r"messages\[0\] must be .*; got dict: {'role': 1"),
        ({"prompt": "a\ud800", "response": LONG}, ValueError, r"remove the lone surrogate '\\ud800'"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, ValueError, r"remove the lone surrogate '\\udfff'"),
    ],
)
def test_what_is_not_an_example_is_named_by_its_index(example: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^example 2: {message}") as caught:
        ExampleTokenizer(BRACKETS)([GOOD, {"messages": CHAT}, example])
    is_short(caught.value)


def is_short(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 320


def test_a_missing_form_may_be_none_as_in_tables_and_other_keys_are_ignored() -> None:
    row: dict[str, Any] = {"prompt": "two", "response": " and", "messages": None, "document": 7}
    assert trained(BRACKETS, row) == ["Ġand", "[SEP]"]
    row = {"prompt": None, "response": None, "messages": CHAT}
    assert text_of(BRACKETS, row) == "Four.[SEP]\nYes.[SEP]\n"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", r"'roles must\\n alternate'"),
        ("{{ messages[0].tool.name }}", "has no attribute 'tool'"),
        ("{% for %}", "Expected"),
        ("{{ messages[0].role + 1 }}", "can only concatenate str"),
    ],
)
def test_a_template_that_fails_is_named_with_the_example_and_the_reason(template: str, reason: str) -> None:
    chat = [{"role": "user", "content": LONG}]
    with pytest.raises(ValueError, match=rf"^example 1: the chat template fails at {{'role': 'us.*{reason}") as caught:
        ExampleTokenizer(BRACKETS, template)([GOOD, {"messages": chat}])
    is_short(caught.value)


CHANGES = [
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ '[SEP]' if loop.last }};{% endfor %}",
    "{% for m in messages[-2:] %}{{ m.role }}:{{ m.content }};{% endfor %}",
    "{{ messages | length }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
    "{{ messages[-1].content }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
    "{% for m in messages %}{{ m.role }}:{{ '<think>' if loop.last and loop.index % 2 }}{{ m.content }};{% endfor %}",
]


@pytest.mark.parametrize("template", CHANGES)
@pytest.mark.parametrize("train_headers", [False, True])
def test_a_template_that_does_more_than_append_is_an_error_that_names_the_message(
    template: str, train_headers: bool
) -> None:
    tokenizer = ExampleTokenizer(BRACKETS, template, train_headers=train_headers)
    with pytest.raises(ValueError, match=r"^example 1: messages\[2\]: .* give a chat_template that only") as caught:
        tokenizer([GOOD, {"messages": CHAT}])
    is_short(caught.value)


@pytest.mark.parametrize("condition", ["messages[-1].content == 'Four.'", "messages[-1].content | length < 3"])
def test_a_content_that_changes_what_is_before_it_is_an_error_also_at_the_last_message(condition: str) -> None:
    template = "{{ " + condition + " }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with pytest.raises(ValueError, match=r"^example 0: messages\[2\]: .* give a chat_template that only"):
        ExampleTokenizer(BRACKETS, template)([{"messages": CHAT[:3]}])


def test_a_template_that_does_not_show_a_content_that_trains_is_an_error() -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
    assert text_of(BRACKETS, {"messages": CHAT}, chat_template=template) == "Four.;Yes.;"
    tokenizer = ExampleTokenizer(BRACKETS, template, train_roles=["system"])
    with pytest.raises(
        ValueError, match=r"^example 0: messages\[0\]: .* leave its role out of train_roles, or"
    ) as caught:
        tokenizer([{"messages": CHAT}])
    is_short(caught.value)


def test_a_tokenizer_that_is_not_fast_is_an_error() -> None:
    for slow in (object(), PreTrainedTokenizer.__new__(PreTrainedTokenizer), BYTES):
        with pytest.raises(TypeError, match=f"tokenizer must be a fast one, .*; got {type(slow).__name__}"):
            ExampleTokenizer(slow)


def test_train_roles_that_are_a_string_or_empty_or_hold_no_strings_are_errors() -> None:
    for wrong in ("assistant", [1], ["user", None]):
        with pytest.raises(
            TypeError, match=r"train_roles must be a sequence of strings, such as \('assistant',\); got "
        ):
            ExampleTokenizer(BRACKETS, train_roles=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="train_roles is empty"):
        ExampleTokenizer(BRACKETS, train_roles=[])


def test_importing_the_module_imports_neither_transformers_nor_composer() -> None:
    script = (
        "import sys, composer_packing; before = set(sys.modules); import composer_packing.data.chat_examples;"
        "print({name.split('.')[0] for name in set(sys.modules) - before} & {'transformers', 'tokenizers', 'composer'})"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "set()"


def test_any_error_that_a_template_raises_is_named_with_the_example() -> None:
    for template in ("{{ 1 // 0 }}", "{{ 'a'.index('b') }}"):
        with pytest.raises(ValueError, match="example 0: the chat template fails at"):
            ExampleTokenizer(BRACKETS, chat_template=template)([{"messages": CHAT}])


def test_the_default_template_refuses_contents_that_are_not_text() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Two?"}]}, {"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="the default template takes strings as content"):
        ExampleTokenizer(BRACKETS)([{"messages": chat}])


def test_tools_of_an_example_reach_the_template_and_do_not_train() -> None:
    template = (
        "{% if tools %}{{ tools | tojson }};{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    example = {"messages": CHAT[1:3], "tools": tools}
    (result,) = ExampleTokenizer(BRACKETS, chat_template=template)([example])
    assert '"name": "add"' in decode(BRACKETS, result["input_ids"])
    assert text_of(BRACKETS, example, chat_template=template) == "Four.;"


def test_a_response_that_ends_in_the_eos_gets_no_second_one() -> None:
    tokenizer = without_post_processor(eos_token="[SEP]")
    assert trained(tokenizer, {"prompt": "Two?", "response": "2[SEP]"})[-2:] == ["2", "[SEP]"]
