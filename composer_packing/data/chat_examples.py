r"""Examples for supervised fine-tuning: token ids, and a mask of the tokens that the loss is taken over.

The text of an example is either a prompt followed by its response, or a chat rendered by a template. The first step
decides for each character of the text whether the character trains. Then the text is tokenized once, as a whole. A
token trains if at least one of its characters does; the tokenizer's offsets say which characters a token has. A
rendered chat, where `#` trains::

    rendered    [CLS]<|user|>\nTwo and two?[SEP]\n<|assistant|>\nFour.[SEP]\n
    characters  .................................................############
    tokens      [CLS] < | user | > \n Two  and  two ? [SEP] \n < | assistant | > \n Four . [SEP] \n
    mask          0   0 0  0   0 0 0   0    0    0  0   0   0  0 0     0     0 0 0   1   1   1   1

A token that holds the end of a prompt and the start of its response trains, as the model has to predict this token
after the tokens before it.

Two libraries make such masks, and neither is used:

| library                                      | reason                                                            |
|----------------------------------------------|-------------------------------------------------------------------|
| transformers, `return_assistant_tokens_mask` | needs `{% generation %}` in the template. Without it, as in most  |
|                                              | templates, it warns and the mask is all 0. It knows one role.     |
| TRL, `prompt` and `completion`               | tokenizes the prompt alone, and takes as many tokens of the whole |
|                                              | as header. Where the two differ, it warns and the mask is wrong.  |
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token or cls_token or '' }}{% for message in messages %}"
    "{% if message['content'] is not string and message['content'] is not none %}"
    "{{ raise_exception('the default template takes strings as content') }}{% endif %}"
    "{% if tools or message['tool_calls'] %}"
    "{{ raise_exception('the default template knows no tools; give a chat_template that does') }}{% endif %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] or '' }}{{ eos_token or sep_token or '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The template that renders a chat if neither the caller nor the tokenizer has one."""

SENTINELS = ("x", "yy")
"""Two contents to find where a template begins to write the content of a message.

They differ from the first character on and in length. No template strips them or takes them for markup.
"""


class _Text(NamedTuple):
    """The text of an example, before it is tokenized.

    Attributes:
        text: the prompt and response, or the rendered chat.
        trains: bool `(characters,)`.
        is_chat: the template has written all special tokens, so that the tokenizer adds none.
    """

    text: str
    trains: NDArray[np.bool_]
    is_chat: bool


class ExampleTokenizer:
    """Tokenizes examples, and says which of their tokens train. Examples may have one of two forms, in any mixture.

    A prompt and a response, `{"prompt": str, "response": str}`:

    - The response trains, and so does its end, so that the model learns to stop.
    - Special tokens that the tokenizer adds after the text train. Special tokens before the text never train.
    - If the tokenizer adds no token after the text and has an `eos_token_id`, this id is added to the response and
      trains, unless the response ends in it.
    - An empty response trains nothing, and no id is added to it.

    A chat, `{"messages": [{"role": str, "content": str}, ...]}`, with `"tools"` for the template if there are any:

    - Messages of `train_roles` train, from the start of their content to the end that the template writes.
    - Empty messages train nothing.
    - The template writes all special tokens. If it writes nothing after a message, the model does not learn to stop.
    - What the template writes before the content is the header, also when it is an empty `<think>` block. To find the
      start of a content, the chat is rendered with other contents for the message: the content begins where these
      renderings begin to differ.

    Args:
        tokenizer: a fast tokenizer, which knows the characters of its tokens.
        chat_template: in Jinja; None for the tokenizer's own, or `DEFAULT_CHAT_TEMPLATE` if it has none.
        train_roles: roles whose messages train.
        train_headers: the headers of these messages train too.

    Raises:
        TypeError: the tokenizer is not fast, or `train_roles` is not a sequence of strings.
        ValueError: `train_roles` is empty.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        chat_template: str | None = None,
        train_roles: Sequence[str] = ("assistant",),
        train_headers: bool = False,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TypeError(f"tokenizer must be a fast one, as AutoTokenizer gives it; got {type(tokenizer).__name__}")
        if isinstance(train_roles, str) or not all(isinstance(role, str) for role in train_roles):
            raise TypeError(
                f"train_roles must be a sequence of strings, such as ('assistant',); got {train_roles!r:.80}"
            )
        if not train_roles:
            raise ValueError("train_roles is empty, so nothing would train; give a role, such as ('assistant',)")
        self._tokenizer = tokenizer
        self._chat_template = chat_template or (None if tokenizer.chat_template else DEFAULT_CHAT_TEMPLATE)
        self._train_roles, self._train_headers = frozenset(train_roles), train_headers

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tokenize many examples at once. A fast tokenizer does so in parallel.

        Returns:
            For each example, in order, `{"input_ids": ids, "loss_mask": mask}`. The ids are int64 `(tokens,)`. The mask
            is uint8 `(tokens,)`: 1 for a token that is to be predicted, else 0.

        Raises:
            TypeError: an example, its prompt, response or messages has the wrong type.
            ValueError: an example has neither form, both forms, or a lone surrogate. Or the template fails, does not
                show a content that trains, or renders a message differently when others follow.
        """
        texts = [self._make_text(index, example) for index, example in enumerate(examples)]
        tokenized: dict[int, dict[str, Any]] = {}
        for is_chat in {text.is_chat for text in texts}:
            indices = [index for index, text in enumerate(texts) if text.is_chat == is_chat]
            encoded = self._tokenizer(
                [texts[index].text for index in indices],
                add_special_tokens=not is_chat,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                verbose=False,  # no warning that a text is longer than the model takes: the packer cuts
            )
            columns = (encoded[name] for name in ("input_ids", "offset_mapping", "special_tokens_mask"))
            for index, ids, offsets, added in zip(indices, *columns, strict=True):
                tokenized[index] = self._make_example(texts[index], ids, offsets, np.array(added, bool))
        return [tokenized[index] for index in range(len(texts))]

    def _make_example(self, text: _Text, ids: list[int], offsets: Any, added: NDArray[np.bool_]) -> dict[str, Any]:
        mask = np.zeros(len(ids), np.uint8)
        own = np.flatnonzero(~added)
        if len(own) and text.trains.any():
            starts, ends = np.array(offsets, np.int64).T
            # A tokenizer that trims spaces gives a token of spaces an empty range, at the end of the spaces.
            starts = np.where(starts == ends, np.maximum(ends - 1, 0), starts)
            trained_before = np.concatenate([[0], np.cumsum(text.trains)])
            mask[:] = trained_before[ends] > trained_before[starts]
            end = own[-1] + 1
            mask[end:] = text.trains[-1]
            eos = self._tokenizer.eos_token_id
            if end == len(ids) and eos not in (None, ids[-1]) and not text.is_chat:
                ids, mask = [*ids, eos], np.append(mask, np.uint8(1))
        return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}

    def _make_text(self, index: int, example: Mapping[str, Any]) -> _Text:
        if not isinstance(example, Mapping):
            raise TypeError(f"example {index}: must be a mapping, such as {{'messages': list}}; {_describe(example)}")
        given = {key for key in ("prompt", "response", "messages") if example.get(key) is not None}
        if given not in ({"prompt", "response"}, {"messages"}):
            raise ValueError(
                f"example {index}: must have prompt and response, or else messages; {_describe(dict(example))}"
            )
        text = (
            self._render_chat(index, example["messages"], example.get("tools"))
            if "messages" in given
            else _join_prompt_and_response(index, example)
        )
        try:
            text.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"example {index}: remove the lone surrogate {text.text[error.start]!r}") from error
        return text

    def _render_chat(self, example: int, messages: Any, tools: Any) -> _Text:
        _check_messages(example, messages)
        render = functools.partial(self._render, example, tools)
        render_first = functools.cache(lambda count: render(messages[:count]) if count else "")
        whole = render_first(len(messages))
        trains = np.zeros(len(whole), bool)
        for index, message in enumerate(messages):
            says_something = any(value for key, value in message.items() if key not in ("role", "name"))
            if message["role"] not in self._train_roles or not says_something:
                continue
            before, through = render_first(index), render_first(index + 1)
            others = [] if self._train_headers else _render_other_contents(example, messages[: index + 1], render)
            if not whole.startswith(through) or not all(text.startswith(before) for text in (through, *others)):
                raise ValueError(
                    f"example {example}: messages[{index}]: the template renders {message!r:.80} or a message before "
                    f"differently when another follows; give a chat_template that only appends, message by message"
                )
            shared = os.path.commonprefix([through, *others])  # noqa: RUF071 (these are texts, not paths)
            start = len(shared) if others else len(before)
            trains[start : len(through)] = True
        return _Text(whole, trains, is_chat=True)

    def _render(self, example: int, tools: Any, messages: Sequence[Any]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, chat_template=self._chat_template
                )
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"example {example}: the chat template fails at {messages[-1]!r:.80}: {str(error)!r}; "
                f"correct the template or the message"
            ) from error


def _render_other_contents(example: int, messages: Sequence[Any], render: Callable[[Sequence[Any]], str]) -> list[str]:
    """The renderings of a chat with each of `SENTINELS` as the content of its last message."""
    *before, last = messages
    # Some templates do not show the content of a message with tool calls. The header is the same without them.
    bare = {key: value for key, value in last.items() if key != "tool_calls"}
    others = [render([*before, bare | {"content": content}]) for content in SENTINELS]
    if others[0] == others[1]:
        raise ValueError(
            f"example {example}: messages[{len(before)}]: the template does not show the content of {last!r:.80}; "
            f"leave its role out of train_roles, or give a chat_template that does"
        )
    return others


def _join_prompt_and_response(index: int, example: Mapping[str, Any]) -> _Text:
    for key in ("prompt", "response"):
        if not isinstance(example[key], str):
            raise TypeError(f"example {index}: {key!r} must be a string; {_describe(example[key])}")
    text = example["prompt"] + example["response"]
    return _Text(text, np.arange(len(text)) >= len(example["prompt"]), is_chat=False)


def _check_messages(example: int, messages: Any) -> None:
    form = "{'role': str, 'content': str}"
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TypeError(f"example {example}: 'messages' must be a non-empty list of {form}; {_describe(messages)}")
    for index, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
            raise TypeError(f"example {example}: messages[{index}] must be {form}; {_describe(message)}")


def _describe(value: Any) -> str:
    return f"got {type(value).__name__}: {value!r:.80}"
