"""Causal: language models answer a prompt; the loss is on the answer's tokens only.

Rows hold `messages` (the last turn is the answer; the model's chat template renders them), `prompt` and
`completion`, or a text with a label of a closed set. With a label set the answer is the likeliest label;
without one, an answer is right when greedy decoding would give it token by token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.data.rows import question, where
from gradfix.errors import DataError, UsageError
from gradfix.tasks.base import TASKS, Batch, Example, Prompts, label_indices
from gradfix.tasks.loading import first_line
from gradfix.tasks.reading import AnswerBound, AnswerTask, Posed, Tokens, masked_mean, pad, refuse_foreign_tokens

WRONG = -1
ANSWER = "x"  # stands for an answer where only what surrounds it is asked for


class CausalBound(AnswerBound):
    """A language model with its template. Token tensors are (batch, choices, length): one choice per label,
    or the answer alone where there is no label set."""

    def __init__(self, model: Any, tokenizer: Any, *more: Any) -> None:
        super().__init__(model, tokenizer, *more)
        self._closing = _closing_tokens(tokenizer)
        if self.scoring != "likelihood":
            self.measure = "exact match"

    def collate(self, examples: Sequence[Example]) -> Batch:
        device = next(self.model.parameters()).device
        labels = label_indices(examples, self._index) if self.labels else torch.zeros(len(examples)).long()
        choices: Sequence[str | None] = self.texts or [None]
        rows = [[self._spelled(example, index, text) for text in choices] for index, example in enumerate(examples)]
        flat = [choice for row in rows for choice in row]
        shape = (len(examples), len(choices), -1)
        batch = {
            "input_ids": pad([p + a for p, a in flat], self.tokenizer.pad_token_id).view(shape),
            "attention_mask": pad([[1] * len(p + a) for p, a in flat], 0).view(shape),
            "answer_mask": pad([[0] * len(p) + [1] * len(a) for p, a in flat], 0).view(shape),
            "labels": labels,
        }
        refuse_foreign_tokens(batch["input_ids"], self.tokenizer, self.model)
        if self.scoring == "generate":
            prompts = [row[0][0] for row in rows]
            batch["prompt_ids"] = pad(prompts, self.tokenizer.pad_token_id, left=True)
            batch["prompt_mask"] = pad([[1] * len(p) for p in prompts], 0, left=True)
        return {name: tensor.to(device) for name, tensor in batch.items()}

    def _spelled(self, example: Example, index: int, label_text: str | None) -> tuple[list[int], list[int]]:
        """Tokens of the prompt and of the answer; a prompt that is too long loses its beginning."""
        prompt, answer, special = self._texts(example, index, label_text)
        asked = self.tokenizer(prompt, add_special_tokens=special)["input_ids"]
        said = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        if special:
            asked = asked[: len(asked) - self._closing]
            said = [*said, self._end_token(example, index)]
        if not said or len(said) >= self.max_length:
            raise DataError(
                f"{where(example, index)}: the answer has {len(said)} tokens; it must have at least one and "
                f"leave room for the prompt within {self.max_length}."
            )
        if not asked:
            # Without a first token nothing predicts the answer's beginning.
            asked = [self._first_token(example, index)]
        room = self.max_length - len(said)
        self.limit.saw(prompt, len(asked) > room)
        return asked[-room:], said

    def _first_token(self, example: Example, index: int) -> int:
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise DataError(f"{where(example, index)}: the prompt has no tokens.")

    def _end_token(self, example: Example, index: int) -> int:
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                f"{where(example, index)}: the tokenizer of {self.tokenizer.name_or_path} has no end token to close "
                "the answer with. Set eos_token in its tokenizer_config.json."
            )
        return int(self.tokenizer.eos_token_id)

    def _texts(self, example: Example, index: int, label_text: str | None) -> tuple[str, str, bool]:
        """Prompt, answer, and whether the tokenizer still has to add its own special tokens."""
        if "messages" in example:
            turns = list(example["messages"])
            if label_text is not None:
                turns = [*question(turns), {"role": "assistant", "content": label_text}]
            return *self._rendered(turns, example, index), False
        prompt = example.get("prompt", example.get("text"))
        if not isinstance(prompt, str):
            raise DataError(f"{where(example, index)}: this task needs messages, or a prompt, or a text.")
        if label_text is not None:
            return prompt, label_text if prompt[-1:].isspace() else f" {label_text}", True
        if not isinstance(example.get("completion"), str):
            raise DataError(f"{where(example, index)}: there is a prompt, but no completion and no label set.")
        return prompt, example["completion"], True

    def _rendered(self, turns: list[Any], example: Example, index: int) -> tuple[str, str]:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{where(example, index)}: this model has no chat template for 'messages'. "
                "Copy the fine-tune's chat_template.jinja into its folder, or give prompt and completion instead."
            )
        if len(turns) < 2:
            raise DataError(
                f"{where(example, index)}: there is no question before the answer in 'messages'. Put a user turn there."
            )
        try:
            asked = self.tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
            whole = self.tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # a template is a program of the model's: it raises what it likes
            raise DataError(
                f"{where(example, index)}: the model's chat template refuses this conversation "
                f"({first_line(error)}). Change its turns, or give prompt and completion instead."
            ) from None
        if not whole.startswith(asked):
            raise DataError(
                f"{where(example, index)}: the chat template rewrites the question when the answer is there; "
                "the answer's tokens cannot be told apart. Give prompt and completion instead."
            )
        return asked, whole[len(asked) :]

    def posed(self, example: Example, index: int = 0) -> Posed:
        if "messages" in example:
            turns = [*question(example["messages"]), {"role": "assistant", "content": ANSWER}]
            asked, said = self._rendered(turns, example, index)
            closing = said.partition(ANSWER)[2]
            tokens = self.tokenizer(asked, add_special_tokens=False)["input_ids"]
            return Posed(list(tokens), list(self.tokenizer(closing, add_special_tokens=False)["input_ids"]))
        prompt = example.get("prompt", example.get("text"))
        if not isinstance(prompt, str):
            raise DataError(f"{where(example, index)}: this task needs messages, or a prompt, or a text.")
        tokens = self.tokenizer(prompt)["input_ids"]
        tokens = list(tokens[: len(tokens) - self._closing])
        return Posed(tokens or [self._first_token(example, index)], [self._end_token(example, index)])

    def begun(self, example: Example) -> list[int]:
        """A prompt as tokens up to its last word, for the model to go on with."""
        if "messages" not in example:
            return self.posed(example).question
        turns = question(example["messages"])
        shown = self._rendered([*turns, {"role": "assistant", "content": ANSWER}], example, 0)[0]
        last = str(turns[-1]["content"])
        place = shown.rfind(last)
        text = shown[: place + len(last)] if place >= 0 else shown
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def room(self, question: Tokens, wanted: int) -> tuple[list[int], int]:
        """A question that is too long loses its beginning; it gives up no more than a quarter of the context."""
        wanted = max(1, min(wanted, max(self.max_length - len(question), self.max_length // 4)))
        kept = self.max_length - wanted
        self.limit.saw(tuple(question), len(question) > kept)
        return list(question[-kept:]), wanted

    @property
    def most(self) -> int:
        return self.max_length - 1

    def beside(self, question: Tokens, answer: Tokens) -> list[int]:
        """A given answer stays whole, however much of the question it costs."""
        kept = max(1, self.max_length - len(answer))
        self.limit.saw(tuple(question), len(question) > kept)
        return list(question[-kept:])

    def spoken_logits(self, model: Any, questions: Sequence[Tokens], answers: Sequence[Tokens]) -> Tensor:
        """All answers begin in one column, so that models which can do so score no token of a question."""
        device = next(model.parameters()).device
        said = max(map(len, answers))
        padding = self.tokenizer.pad_token_id
        ids = torch.cat([pad(questions, padding, left=True), pad(answers, padding)], dim=1)
        spoken = pad([[1] * len(answer) for answer in answers], 0).bool()
        mask = torch.cat([pad([[1] * len(q) for q in questions], 0, left=True), spoken.long()], dim=1)
        refuse_foreign_tokens(ids, self.tokenizer, model)
        takes = inspect.signature(model.forward).parameters
        how: dict[str, Any] = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        if "position_ids" in takes:
            how["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0).to(device)
        if "logits_to_keep" in takes:
            how["logits_to_keep"] = said + 1
        logits = model(**how).logits
        logits = logits[:, logits.shape[1] - said - 1 : -1][spoken.to(device)]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # type: ignore[no-any-return]

    def _new_tokens(self, found: Tensor, asked: int) -> Tensor:
        return found[:, asked:]

    def _token_losses(self, model: Any, tokens: Tensor, attention: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and logits-argmax hits per position, zero outside the answer; all of shape (batch, length - 1)."""
        logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets, counts = tokens[:, 1:], answer[:, 1:]
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return losses * counts, (logits.argmax(-1) == targets) | (counts == 0)

    def _own(self, batch: Batch) -> list[Tensor]:
        """Tokens, attention and answer mask of each sample's true answer."""
        names = ("input_ids", "attention_mask", "answer_mask")
        picked = batch["labels"].view(-1, 1, 1)
        return [batch[name].gather(1, picked.expand(-1, 1, batch[name].shape[2])).squeeze(1) for name in names]

    def _reduced(self, token_losses: Tensor, answer: Tensor) -> Tensor:
        total = token_losses.sum(1)
        return total if self.reduction == "sum" else total / answer[:, 1:].sum(1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, attention, answer = self._own(batch)
        return self._reduced(self._token_losses(model, tokens, attention, answer)[0], answer)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """The log-likelihood of every label's text."""
        if not self.labels:
            return super().logits(model, batch)
        names = ("input_ids", "attention_mask", "answer_mask")
        columns = [
            -self._token_losses(model, *(batch[name][:, choice] for name in names))[0].sum(1)
            for choice in range(len(self.labels))
        ]
        return torch.stack(columns, dim=1)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.judge(model, batch)[0]

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Answers and losses; without a label set the answer is 0 where right and -1 where wrong."""
        if self.scoring == "generate":
            return self._by_generation(model, batch), self.loss(model, batch)
        tokens, attention, answer = self._own(batch)
        if self.labels and self.scoring == "likelihood":
            likelihoods = self.logits(model, batch)
            own = -likelihoods.gather(1, batch["labels"].unsqueeze(1))
            return likelihoods.argmax(-1), self._reduced(own, answer)
        losses, hits = self._token_losses(model, tokens, attention, answer)
        right = torch.where(hits.all(1), batch["labels"], WRONG)
        return right, self._reduced(losses, answer)

    def _by_generation(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, _, answer = self._own(batch)
        said = self.generate(model, batch, int(answer.sum(1).max()))
        meant = [self.tokenizer.decode(row[mask.bool()], skip_special_tokens=True) for row, mask in zip(tokens, answer)]
        same = torch.tensor([a.strip() == b.strip() for a, b in zip(said, meant)], device=answer.device)
        return torch.where(same, batch["labels"], WRONG)

    def generate(self, model: Any, batch: Batch, max_new_tokens: int) -> list[str]:
        """What the model says after each prompt, by greedy decoding."""
        prompts = batch["prompt_ids"]
        tokens = model.generate(
            input_ids=prompts,
            attention_mask=batch["prompt_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return self.tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)

    def features(self, model: Any, batch: Batch) -> Tensor:
        """The mean last hidden state over the prompt."""
        tokens, attention, answer = self._own(batch)
        output = model(input_ids=tokens, attention_mask=attention, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        return masked_mean(hidden, attention * (1 - answer))


@TASKS.register("causal")
class Causal(AnswerTask):
    """Instruction data or labelled texts; `labels` may be empty.

    `loss` is "mean" or "sum" over the answer's tokens. `scoring`: "likelihood" over the label set, "exact"
    (would greedy decoding give the answer? one pass), or "generate" (decode, compare the texts)."""

    loader = "AutoModelForCausalLM"
    bound = CausalBound
    scorings = ("likelihood", "exact", "generate")

    def __init__(
        self,
        labels: Mapping[str, Prompts] | None = None,
        *,
        loss: str = "mean",
        scoring: str | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        scoring = scoring or ("likelihood" if labels else "exact")
        super().__init__(labels or {}, loss, scoring, max_length, trust_remote_code)
        if scoring == "likelihood" and not self.labels:
            raise UsageError("scoring by likelihood needs a label set; use exact or generate.")


def _closing_tokens(tokenizer: Any) -> int:
    """How many tokens the tokenizer puts behind a text of its own accord; they would part prompt and answer."""
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    starts = range(len(whole) - len(bare) + 1)
    return next((len(whole) - len(bare) - k for k in starts if whole[k : k + len(bare)] == bare), 0)
