"""Seq2seq: T5 and its kin answer with the label's text, or with any text where there is no label set.

The loss is the negative log-likelihood of the answer's tokens (its end included), averaged over the tokens of
each sample by default. Answers are the likeliest label of the closed set, or what the model generates; without a set
an answer is right when greedy decoding would give it token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.data.rows import where
from gradfix.errors import DataError, UsageError
from gradfix.tasks.base import TASKS, Batch, Example, Prompts, label_indices
from gradfix.tasks.reading import (
    AnswerBound,
    AnswerTask,
    Posed,
    Tokens,
    masked_mean,
    pad,
    refuse_foreign_tokens,
    tokenise,
)

IGNORED = -100
WRONG = -1


class Seq2SeqBound(AnswerBound):
    """A model with the tokens of every label."""

    def __init__(self, model: Any, tokenizer: Any, *more: Any) -> None:
        super().__init__(model, tokenizer, *more)
        if self.open_answers:
            self.measure = "exact match"
            return
        spelled = pad([tokenizer(text_target=text)["input_ids"] for text in self.texts], IGNORED)
        refuse_foreign_tokens(spelled, tokenizer, model)
        self._answers = spelled.to(next(model.parameters()).device)

    def collate(self, examples: Sequence[Example]) -> Batch:
        device = next(self.model.parameters()).device
        if self.open_answers:
            return self._opened(examples, device)
        answers = label_indices(examples, self._index)
        tokens = tokenise(self.tokenizer, examples, self.limit, self.model)
        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "labels": answers.to(device),
        }

    def _opened(self, examples: Sequence[Example], device: torch.device) -> Batch:
        """Questions with the tokens of their own answers, which close with the end token."""
        posed = [self.posed(example, index) for index, example in enumerate(examples)]
        said = [
            [*self.answer_ids(self.answer_text(example, index)), *one.closing]
            for index, (example, one) in enumerate(zip(examples, posed, strict=True))
        ]
        questions = [self.room(one.question, 1)[0] for one in posed]
        refuse_foreign_tokens(pad(said, 0), self.tokenizer, self.model)
        batch = {
            "input_ids": pad(questions, self.tokenizer.pad_token_id),
            "attention_mask": pad([[1] * len(question) for question in questions], 0),
            "answers": pad(said, IGNORED),
            "labels": torch.zeros(len(examples), dtype=torch.long),
        }
        refuse_foreign_tokens(batch["input_ids"], self.tokenizer, self.model)
        return {name: tensor.to(device) for name, tensor in batch.items()}

    def posed(self, example: Example, index: int = 0) -> Posed:
        asked = example.get("prompt", example.get("text"))
        if not isinstance(asked, str):
            raise DataError(f"{where(example, index)}: this task needs a prompt, or a text.")
        if self.tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer of {self.tokenizer.name_or_path} has no end token to close answers with.")
        return Posed(list(self.tokenizer(asked)["input_ids"]), [int(self.tokenizer.eos_token_id)])

    def room(self, question: Tokens, wanted: int) -> tuple[list[int], int]:
        self.limit.saw(tuple(question), len(question) > self.max_length)
        return list(question[: self.max_length]), max(1, min(wanted, self.max_length))

    def spoken_logits(self, model: Any, questions: Sequence[Tokens], answers: Sequence[Tokens]) -> Tensor:
        device = next(model.parameters()).device
        batch = {
            "input_ids": pad(questions, self.tokenizer.pad_token_id).to(device),
            "attention_mask": pad([[1] * len(question) for question in questions], 0).to(device),
        }
        said = pad(answers, IGNORED).to(device)
        return self._answer_logits(model, batch, self._encoded(model, batch), said)[said != IGNORED]

    def _new_tokens(self, found: Tensor, asked: int) -> Tensor:
        return found[:, 1:]

    def _encoded(self, model: Any, batch: Batch) -> Any:
        return model.get_encoder()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])

    def _answer_logits(self, model: Any, batch: Batch, encoded: Any, answers: Tensor) -> Tensor:
        """Scores of every token of the answers, of shape (batch, length, vocabulary)."""
        start = torch.full_like(answers[:, :1], model.config.decoder_start_token_id)
        # Padding behind an answer is never looked at: the decoder is causal and the loss skips it.
        shown = torch.cat([start, answers[:, :-1]], dim=1).masked_fill_(
            torch.cat([torch.zeros_like(start, dtype=torch.bool), answers[:, :-1] == IGNORED], dim=1),
            self.tokenizer.pad_token_id,
        )
        output = model(encoder_outputs=encoded, attention_mask=batch["attention_mask"], decoder_input_ids=shown)
        logits: Tensor = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        return logits

    def _log_likelihoods(self, model: Any, batch: Batch, encoded: Any, answers: Tensor) -> Tensor:
        """Summed over the tokens of each row's answer, shape (batch,)."""
        logits = self._answer_logits(model, batch, encoded, answers)
        losses = functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=IGNORED, reduction="none")
        return -losses.sum(1)

    def _losses(self, likelihoods: Tensor, labels: Tensor) -> Tensor:
        if self.reduction == "sum":
            return -likelihoods
        lengths = (self._answers != IGNORED).sum(1)
        return -likelihoods / lengths[labels]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.open_answers:
            return self.judge(model, batch)[1]
        answers = self._answers[batch["labels"]]
        likelihoods = self._log_likelihoods(model, batch, self._encoded(model, batch), answers)
        return self._losses(likelihoods, batch["labels"])

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """The log-likelihood of every label's text, the input encoded once."""
        if self.open_answers:
            return super().logits(model, batch)
        encoded = self._encoded(model, batch)
        size = len(batch["labels"])
        columns = []
        for answer in self._answers:
            spelled = answer[answer != IGNORED].expand(size, -1)
            columns.append(self._log_likelihoods(model, batch, encoded, spelled))
        return torch.stack(columns, dim=1)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The index of the likeliest label; with scoring "generate" -1 where the text is no label.

        Without a label set 0 where the answer is right and -1 where it is wrong."""
        if self.open_answers:
            return self.judge(model, batch)[0]
        if self.scoring == "likelihood":
            return self.logits(model, batch).argmax(-1)
        texts = [" ".join(text.split()).casefold() for text in self.generate(model, batch)]
        places = {" ".join(text.split()).casefold(): index for index, text in enumerate(self.texts)}
        return torch.tensor([places.get(text, -1) for text in texts], device=batch["labels"].device)

    def generate(self, model: Any, batch: Batch) -> list[str]:
        """What the model says by greedy decoding, as long as the longest label at most."""
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self._answers.shape[1],
            do_sample=False,
            num_beams=1,
        )
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.open_answers:
            answers = batch["answers"]
            logits = self._answer_logits(model, batch, self._encoded(model, batch), answers)
            losses = functional.cross_entropy(
                logits.transpose(1, 2), answers, ignore_index=IGNORED, reduction="none"
            ).sum(1)
            right = ((logits.argmax(-1) == answers) | (answers == IGNORED)).all(1)
            mean = losses if self.reduction == "sum" else losses / (answers != IGNORED).sum(1)
            return torch.where(right, batch["labels"], WRONG), mean
        if self.scoring == "generate":
            return super().judge(model, batch)
        likelihoods = self.logits(model, batch)
        own = likelihoods.gather(1, batch["labels"].unsqueeze(1)).squeeze(1)
        return likelihoods.argmax(-1), self._losses(own, batch["labels"])

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        hidden = self._encoded(model, batch).last_hidden_state
        return masked_mean(hidden, batch["attention_mask"])


@TASKS.register("seq2seq")
class Seq2Seq(AnswerTask):
    """Labels are spelled out: `{"entailment": "yes", ...}`, or their names where no text is given.

    Without labels rows hold `prompt` and `completion`, and answers are open. `loss` is "mean" or "sum" over the answer's
    tokens, `scoring` "likelihood" or "generate"; of open answers the likelihood is that of their own text."""

    loader = "AutoModelForSeq2SeqLM"
    bound = Seq2SeqBound
    scorings = ("likelihood", "generate")

    def __init__(
        self,
        labels: Mapping[str, Prompts] | None = None,
        *,
        loss: str = "mean",
        scoring: str = "likelihood",
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if labels and len(labels) < 2:
            raise UsageError("a seq2seq task needs at least two labels with their texts, or none and open answers.")
        super().__init__(labels or {}, loss, scoring, max_length, trust_remote_code)
