"""Text encoders with a sequence-classification fine-tune, and encoders used without a head."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.journeys.kinds import Kind, Maker, add, class_names, copy_files, save_pair, seeded, tower
from tests.journeys.scorers import embed, text_classes, text_encoder
from tests.journeys.toys import TEXT_LABELS, class_numbers, fit, read_rows, tokenised, write_texts
from tests.tiny import VOCAB, save_tokenizer

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZE: dict[str, Any] = {"vocab_size": len(VOCAB), "pad_token_id": 0, "max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**tower(), **SIZE, **QUIET},
    "roberta": {**tower(), **SIZE, **QUIET},
    "mpnet": {**tower(), **SIZE, **QUIET},
    "electra": {**tower(embedding_size=32), **SIZE, **QUIET},
    "albert": {**tower(embedding_size=16), **SIZE, **QUIET},
    "deberta-v2": {
        **tower(relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm"),
        **{**SIZE, **QUIET, "pooler_dropout": 0.0, "share_att_key": True, "position_biased_input": False},
    },
    "distilbert": {
        **{"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "initializer_range": 0.1, **SIZE},
        **{"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    },
    "modernbert": {
        **tower(), **SIZE, "global_attn_every_n_layers": 2, "local_attention": 16, "bos_token_id": 4, "cls_token_id": 4,
        "eos_token_id": 5, "sep_token_id": 5,
    },
}  # fmt: skip


def config_of(model_type: str, **more: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **more})


def pretrained(class_name: str, model_type: str, **options: Any) -> Any:
    """A base as its authors would save it: `class_name` built from the family's config."""
    import transformers

    seeded()
    return getattr(transformers, class_name)(config_of(model_type), **options)


def classifier(model: Any, tokenizer_folder: Path, data: Path, lr: float = 5e-3) -> None:
    from transformers import AutoTokenizer

    rows = read_rows(data, "train")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    tokens = tokenised(tokenizer, rows)
    labels = class_numbers(rows, TEXT_LABELS)
    fit(model, lambda: model(**tokens, labels=labels).loss, lr=lr)


def tune_classifier(folder: Path, *, named: bool = True, lr: float = 5e-3) -> Any:
    """What every tutorial does: AutoModelForSequenceClassification on the base, some steps, save_pretrained."""
    from transformers import AutoModelForSequenceClassification

    seeded(1)
    names = class_names(TEXT_LABELS) if named else {"num_labels": len(TEXT_LABELS)}
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", **names)
    classifier(model, folder / "base", folder / "data", lr)
    model.save_pretrained(folder / "tuned")
    copy_files(folder / "base", folder / "tuned", "tokenizer*", "special_tokens*")
    return model


def encoder_kind(class_name: str, model_type: str, folder: Path, **options: Any) -> None:
    write_texts(folder / "data")
    save_pair(
        folder, pretrained(class_name, model_type, **options), partial(save_tokenizer, prefix="[CLS]", suffix="[SEP]")
    )
    tune_classifier(folder)


def with_trainer(folder: Path) -> None:
    """The same with transformers' Trainer, whose folder holds training_args.bin besides; data in parquet."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    write_texts(folder / "data", parquet=True)
    save_pair(folder, pretrained("BertForMaskedLM", "bert"), partial(save_tokenizer, prefix="[CLS]", suffix="[SEP]"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    rows = read_rows(folder / "data", "train")
    examples = [{**tokenizer(row["text"]), "label": TEXT_LABELS.index(row["label"])} for row in rows]
    seeded(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", **class_names(TEXT_LABELS))
    settings = TrainingArguments(
        folder / "runs", max_steps=40, per_device_train_batch_size=36, learning_rate=5e-3, lr_scheduler_type="constant",
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(model, settings, data_collator=collator, train_dataset=examples, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(folder / "tuned"))


def headed(folder: Path) -> None:
    """A base that already has the task's head, trained a little: the classical case of the paper."""
    write_texts(folder / "data")
    seeded()
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(config_of("bert", **class_names(TEXT_LABELS)))
    save_pair(folder, model, partial(save_tokenizer, prefix="[CLS]", suffix="[SEP]"))
    tune_classifier(folder)


def numbered(folder: Path) -> None:
    """Nameless classes: LABEL_0, LABEL_1, LABEL_2 in the model, numbers in the data."""
    write_texts(folder / "data", numbered=True)
    save_pair(folder, pretrained("BertModel", "bert"), partial(save_tokenizer, prefix="[CLS]", suffix="[SEP]"))
    tune_classifier(folder, named=False)


ENCODERS: dict[str, tuple[str, Maker]] = {
    "bert-bare": ("BertModel with pooler", partial(encoder_kind, "BertModel", "bert")),
    "bert-no-pooler": ("BertModel without pooler", partial(encoder_kind, "BertModel", "bert", add_pooling_layer=False)),
    "bert-mlm": ("BertForMaskedLM, tuned with Trainer, parquet data", with_trainer),
    "bert-pretraining": ("BertForPreTraining", partial(encoder_kind, "BertForPreTraining", "bert")),
    "bert-numbered": ("BertModel, nameless classes", numbered),
    "roberta-mlm": ("RobertaForMaskedLM", partial(encoder_kind, "RobertaForMaskedLM", "roberta")),
    "roberta-bare": ("RobertaModel with pooler", partial(encoder_kind, "RobertaModel", "roberta")),
    "distilbert-mlm": ("DistilBertForMaskedLM", partial(encoder_kind, "DistilBertForMaskedLM", "distilbert")),
    "modernbert-mlm": ("ModernBertForMaskedLM", partial(encoder_kind, "ModernBertForMaskedLM", "modernbert")),
    "electra-pretraining": ("ElectraForPreTraining", partial(encoder_kind, "ElectraForPreTraining", "electra")),
    "deberta-mlm": ("DebertaV2ForMaskedLM", partial(encoder_kind, "DebertaV2ForMaskedLM", "deberta-v2")),
    "albert-mlm": ("AlbertForMaskedLM", partial(encoder_kind, "AlbertForMaskedLM", "albert")),
    "albert-pretraining": ("AlbertForPreTraining", partial(encoder_kind, "AlbertForPreTraining", "albert")),
    "mpnet-mlm": ("MPNetForMaskedLM", partial(encoder_kind, "MPNetForMaskedLM", "mpnet")),
}


def tune_encoder(folder: Path, pooling: str, longest: int = 64) -> None:
    """Pull texts towards the prompts of their label, as the untuned encoder sees them."""
    from transformers import AutoModel, AutoTokenizer

    prompts = json.loads((folder / "data" / "task.json").read_text())["labels"]
    model, tokenizer = (AutoModel.from_pretrained(folder / "base"), AutoTokenizer.from_pretrained(folder / "base"))
    head = embed(model, tokenizer, list(prompts.values()), pooling, longest)
    rows = read_rows(folder / "data", "train")
    labels = class_numbers(rows, list(prompts))
    look = embed.__wrapped__  # the same vectors, with gradients
    lines = [row["text"] for row in rows]
    fit(
        model,
        lambda: functional.cross_entropy(20 * look(model, tokenizer, lines, pooling, longest) @ head.T, labels),
        steps=30,
        lr=2e-3,
    )
    model.save_pretrained(folder / "tuned")
    copy_files(folder / "base", folder / "tuned", "tokenizer*", "special_tokens*")


def zero_shot(folder: Path, pooling: str = "mean", sentence: bool = False) -> None:
    write_texts(folder / "data", prompts=True)
    save_pair(folder, pretrained("BertModel", "bert"), partial(save_tokenizer, prefix="[CLS]", suffix="[SEP]"))
    tune_encoder(folder, pooling)
    if sentence:
        for role in ("base", "tuned", "target"):
            as_sentence_folder(folder / role, pooling)


def as_sentence_folder(folder: Path, pooling: str) -> None:
    """The files sentence-transformers writes beside the transformer's own."""
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    entries = [
        {"idx": int(number), "name": number, "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, path, name in modules
    ]
    poolings = {
        "word_embedding_dimension": 32, "pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False, "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": False, "include_prompt": True,
    }  # fmt: skip
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir()
    files = {
        "modules.json": entries,
        "1_Pooling/config.json": poolings,
        "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "5.1.0", "transformers": "5.0.0", "pytorch": torch.__version__},
            "model_type": "SentenceTransformer", "prompts": {"query": "", "document": ""}, "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


add(Kind("bert-headed", "BertForSequenceClassification on all sides", "classification", headed, text_classes))
for name, (says, make) in ENCODERS.items():
    add(Kind(name, f"{says}; sequence classifier", "classification", make, text_classes, head=True))
add(Kind("bert-zero-shot", "BertModel, prompts as labels", "zero-shot", zero_shot, text_encoder(), side=True))
for pooling in ("mean", "cls"):
    add(Kind(f"sentence-{pooling}", f"sentence-transformers folder, {pooling} pooling", "zero-shot",
             partial(zero_shot, pooling=pooling, sentence=True), text_encoder(sentence_folder=True), side=True))  # fmt: skip
