"""The methods of an `LLM` that generate nothing: vectors of texts, and scores of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jattn.llm.load import SentenceModules, TextTokenizer
from jattn.llm.text.embeddings import EmbeddingRequestOutput, embed
from jattn.llm.text.pairs import cut_prompt
from jattn.llm.text.prompts import Prompt, as_prompts, encoded, with_beginning
from jattn.llm.text.scores import ScoringRequestOutput, score


class VectorsOfTexts:
    """The part of an `LLM` that needs no engine."""

    model: Any
    tokenizer: TextTokenizer | None
    sentence_modules: SentenceModules

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns a vector for each prompt, from an encoder such as BERT, or from a decoder's last hidden states.

        Args:
            prompts: as in `generate`; an empty text is the special tokens that the tokenizer adds to every text.
            pooling: "mean" over a prompt's tokens, "cls" for the first token, or "last"; None for that of the folder's
                modules.json (sentence-transformers), or "mean" without one. The dense layers that this file names
                follow, and its model may read texts in lower case.
            normalize: scale every vector to length 1, so that a dot product is the cosine.
            truncate_prompt_tokens: cut the ends of longer prompts, so that they have this many tokens, special ones
                included; -1 for as many as the model reads, None to refuse longer ones.
            prompt_name: the use of the texts, such as "query" or "document", by whose prompt in the folder's
                config_sentence_transformers.json they begin; None for the folder's default, "" for no prompt. Prompts
                of token ids stay as they are.

        Raises:
            InvalidInput: a prompt without tokens, a token outside the vocabulary, another pooling, or an unknown
                prompt_name.
            RequestTooLong: a prompt is longer than the model's context.
            Unsupported: the model is a module of your own, has an encoder before its decoder, or its folder names
                modules that this build does not have.

        Example:
            >>> from jattn import LLM
            >>> llm = LLM()
            >>> first, second = (each.outputs.embedding for each in llm.embed(["A list", "A tuple"]))
            >>> bool(first @ second < 1.0)
            True
        """
        most, listed, cut = self.longest_prompt, as_prompts(prompts), truncate_prompt_tokens
        beginning, lower = self.sentence_modules.prompt(prompt_name), self.sentence_modules.do_lower_case
        if beginning or lower:
            listed = [with_beginning(beginning, each, lower=lower) for each in listed]
        token_ids = [
            encoded(each, self.tokenizer, most, may_be_empty=True)[0]
            if cut is None
            else cut_prompt(each, self.tokenizer, most, cut)
            for each in listed
        ]
        return embed(self.model, token_ids, pooling=pooling, normalize=normalize, modules=self.sentence_modules)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        pooling: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns how well each text of `text_2` fits that of `text_1`: a cross-encoder's score, or a cosine.

        Args:
            text_1: a text, or as many as there are in `text_2`.
            text_2: a text or several.
            truncate_prompt_tokens: as in `embed`; of a pair the longer text is cut first.
            use_activation: apply the function that the model's config names (the sigmoid); False for logits.
            pooling: as in `embed`, of a model without labels, whose score is the cosine of two vectors. No prompt
                of the folder is put before the texts.

        Raises:
            InvalidInput: an argument is wrong, or there is no tokenizer.
            RequestTooLong: a pair is longer than the model's context, and is not cut.
            Unsupported: as `embed`; the model has several labels.
        """
        options: dict[str, Any] = {"use_activation": use_activation, "pooling": pooling, "cut": truncate_prompt_tokens}
        options["modules"] = self.sentence_modules
        return score(self.model, self.tokenizer, text_1, text_2, **options)
