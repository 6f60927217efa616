r"""Examples of supervised fine-tuning, as token ids and a mask of the tokens that a loss is taken of.

A prompt and its response are put behind one another, a chat is rendered by a template. Either is tokenized once, as
a whole, and what trains is settled in characters first. A rendered chat, where `#` trains::

    rendered    [CLS]<|user|>\nTwo and two?[SEP]\n<|assistant|>\nFour.[SEP]\n
    characters  .................................................############
    tokens      [CLS] < | user | > \n Two  and  two ? [SEP] \n < | assistant | > \n Four . [SEP] \n
    mask          0   0 0  0   0 0 0   0    0    0  0   0   0  0 0     0     0 0 0   1   1   1   1

A token trains if at least one of its characters does, by the offsets of the tokenizer. One that holds the end of a
prompt and the start of its response trains, for it is what the model has to write there.
"""

import functools
import itertools
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
"""What renders chats where neither the caller nor the tokenizer has a template."""

SENTINELS = ("x", "yy")  # contents that differ at once and in length, and that no template strips or takes for markup


class _Text(NamedTuple):
    text: str
    trains: NDArray[np.bool_]  # (characters,)
    is_chat: bool


class ExampleTokenizer:
    """Tokenizes examples of two forms, which may come mixed.

    `{"prompt": str, "response": str}`: the response trains, and what ends it, so that the model learns to stop. Special
    tokens that the tokenizer puts behind the text train with it, those before it never. Where it puts none behind and
    has an `eos_token_id`, that is put behind a response that is not empty and does not end in it, and trains. An empty
    response trains nothing.

    `{"messages": [{"role": str, "content": str}, ...]}`, and `"tools"` for the template if there are any: messages of
    `train_roles` train, from where their content begins to where the template ends them; empty ones do not. All special
    tokens are the template's; one that writes nothing behind a message teaches no stop. A content begins where the
    renderings with other contents in its place part; what comes before, be it an empty `<think>` block, is header.

    Args:
        tokenizer: a fast one, which knows the characters of its tokens.
        chat_template: Jinja; None for the tokenizer's own, or `DEFAULT_CHAT_TEMPLATE` where it has none.
        train_roles: roles whose messages train.
        train_headers: their headers train too: all the template writes since the message before.

    Raises:
        TypeError: the tokenizer is not fast; `train_roles` is no sequence of strings.
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
            raise TypeError(f"train_roles must be a sequence of strings, as ('assistant',); got {train_roles!r:.80}")
        if not train_roles:
            raise ValueError("train_roles is empty, so that nothing would train; give at least one, as ('assistant',)")
        self._tokenizer = tokenizer
        self._chat_template = chat_template or (None if tokenizer.chat_template else DEFAULT_CHAT_TEMPLATE)
        self._train_roles, self._train_headers = frozenset(train_roles), train_headers

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tokenize many examples at once, which a fast tokenizer does in parallel.

        Returns:
            For each example in order `{"input_ids": ids, "loss_mask": mask}`: int64 `(tokens,)`, and uint8
            `(tokens,)`, 1 where that very token is to be predicted. The mask is all 0 where nothing trains.

        Raises:
            TypeError: an example, or its prompt, response or messages, is something else.
            ValueError: an example has neither form or both, or a lone surrogate; the template fails, does not show
                a content that trains, or renders a message otherwise when others follow.
        """
        texts = [self._text(number, example) for number, example in enumerate(examples)]
        tokenized: dict[int, dict[str, Any]] = {}
        for is_chat in {text.is_chat for text in texts}:
            numbers = [number for number, text in enumerate(texts) if text.is_chat == is_chat]
            encoded = self._tokenizer(
                [texts[number].text for number in numbers],
                add_special_tokens=not is_chat,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                verbose=False,  # that a text is longer than the model: it is the packer that cuts
            )
            columns = (encoded[name] for name in ("input_ids", "offset_mapping", "special_tokens_mask"))
            for number, ids, offsets, added in zip(numbers, *columns, strict=True):
                tokenized[number] = self._masked(texts[number], ids, offsets, np.array(added, bool))
        return [tokenized[number] for number in range(len(texts))]

    def _masked(self, text: _Text, ids: list[int], offsets: Any, added: NDArray[np.bool_]) -> dict[str, Any]:
        mask = np.zeros(len(ids), np.uint8)
        own = np.flatnonzero(~added)
        if len(own) and text.trains.any():
            starts, ends = np.array(offsets, np.int64).T
            # A tokenizer that trims spaces says of a token of spaces only where they end.
            starts = np.where(starts == ends, np.maximum(ends - 1, 0), starts)
            trained_before = np.concatenate([[0], np.cumsum(text.trains)])
            mask[:] = trained_before[ends] > trained_before[starts]
            behind = own[-1] + 1
            mask[behind:] = text.trains[-1]
            eos = self._tokenizer.eos_token_id
            if behind == len(ids) and eos not in (None, ids[-1]) and not text.is_chat:
                ids, mask = [*ids, eos], np.append(mask, np.uint8(1))
        return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}

    def _text(self, number: int, example: Mapping[str, Any]) -> _Text:
        if not isinstance(example, Mapping):
            raise TypeError(f"example {number}: must be a mapping, as {{'messages': list}}; {_got(example)}")
        given = {key for key in ("prompt", "response", "messages") if example.get(key) is not None}
        if given not in ({"prompt", "response"}, {"messages"}):
            raise ValueError(
                f"example {number}: must have prompt and response, or else messages; {_got(dict(example))}"
            )
        text = (
            self._chat(number, example["messages"], example.get("tools"))
            if "messages" in given
            else _prompt_response(number, example)
        )
        try:
            text.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"example {number}: remove the lone surrogate {text.text[error.start]!r}") from error
        return text

    def _chat(self, number: int, messages: Any, tools: Any) -> _Text:
        _check_messages(number, messages)
        render = functools.partial(self._render, number, tools)
        rendering = functools.cache(lambda count: render(messages[:count]) if count else "")
        whole = rendering(len(messages))
        trains = np.zeros(len(whole), bool)
        for index, message in enumerate(messages):
            says_something = any(value for key, value in message.items() if key not in ("role", "name"))
            if message["role"] not in self._train_roles or not says_something:
                continue
            before, through = rendering(index), rendering(index + 1)
            others = [] if self._train_headers else _with_other_contents(number, messages[: index + 1], render)
            if not whole.startswith(through) or not all(text.startswith(before) for text in (through, *others)):
                raise ValueError(
                    f"example {number}: messages[{index}]: the template renders {message!r:.80} or those before it "
                    f"otherwise when something follows; give a chat_template that only appends, message by message"
                )
            start = _common(through, *others) if others else len(before)
            trains[start : len(through)] = True
        return _Text(whole, trains, is_chat=True)

    def _render(self, number: int, tools: Any, messages: Sequence[Any]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, chat_template=self._chat_template
                )
            )
        except Exception as error:  # what a template does may fail in any way
            raise ValueError(
                f"example {number}: the chat template fails at {messages[-1]!r:.80}: {str(error)!r}; correct either"
            ) from error


def _with_other_contents(number: int, messages: Sequence[Any], render: Callable[[Sequence[Any]], str]) -> list[str]:
    *before, last = messages
    # Tool calls hide the content in some templates; the header is the same without them.
    bare = {key: value for key, value in last.items() if key != "tool_calls"}
    others = [render([*before, bare | {"content": content}]) for content in SENTINELS]
    if others[0] == others[1]:
        raise ValueError(
            f"example {number}: messages[{len(before)}]: the template does not show the content of {last!r:.80}; "
            f"leave its role out of train_roles, or give a chat_template that does"
        )
    return others


def _common(*texts: str) -> int:
    """How many characters all of them begin with."""
    return sum(1 for _ in itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False)))


def _prompt_response(number: int, example: Mapping[str, Any]) -> _Text:
    for key in ("prompt", "response"):
        if not isinstance(example[key], str):
            raise TypeError(f"example {number}: {key!r} must be a string; {_got(example[key])}")
    text = example["prompt"] + example["response"]
    return _Text(text, np.arange(len(text)) >= len(example["prompt"]), is_chat=False)


def _check_messages(number: int, messages: Any) -> None:
    form = "{'role': str, 'content': str}"
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TypeError(f"example {number}: 'messages' must be a non-empty list of {form}; {_got(messages)}")
    for index, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
            raise TypeError(f"example {number}: messages[{index}] must be {form}; {_got(message)}")


def _got(value: Any) -> str:
    return f"got {type(value).__name__}: {value!r:.80}"
