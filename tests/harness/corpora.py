"""The tests' prompts are the ones ``loadtest`` ships."""

from loadtest.corpora import bos, branching, prompts, questions, turns

__all__ = ["bos", "branching", "prompts", "questions", "turns"]
