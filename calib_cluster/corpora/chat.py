"""Prompts in the form in which the model is served: its own chat template."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from calib_cluster.corpora.documents import Message
from calib_cluster.errors import CalibrationError

CONTENT = "raggedkvcontent"  # stands for the text while a template is taken apart


class ChatFormat:
    """The chat template of a tokenizer. Raises CalibrationError if it has none."""

    def __init__(self, tokenizer) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "")
            raise CalibrationError(
                f"the tokenizer of {name} has no chat template; calibrate without --chat-template"
            )
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], source: str) -> str:
        """The conversation as the model is to read it, special tokens spelled out.

        One that ends with the user's turn is followed by the mark of the model's turn, as when
        it is served. ``source`` names it in the CalibrationError that a template may cause.
        """
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=messages[-1].role == "user"
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise CalibrationError(
                f"{source}: the model's chat template refuses it ({error})"
            ) from error

    def around(self, source: str) -> tuple[str, str]:
        """What the template puts before and after one user message."""
        text = self.render([Message("user", CONTENT)], source)
        before, found, after = text.partition(CONTENT)
        if not found:
            raise CalibrationError(f"{source}: the model's chat template drops user messages")
        return before, after
