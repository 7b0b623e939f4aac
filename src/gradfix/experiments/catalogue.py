"""The paper's datasets as data: where they are, which splits and columns, and how we name their classes.

Class names and templates are worded here. `classes` is in the order of the hub's class numbers; a dataset whose
labels are strings maps each of them. Sizes serve the cost estimate only, tables count what was loaded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradfix.data import Dataset, load_data
from gradfix.data.load import load_hub
from gradfix.data.splits import without_overlap
from gradfix.errors import DataError

VALIDATION_SHARE, VALIDATION_MOST = 0.1, 5000


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One dataset. `train` None means it is only ever tested on; without `validation` a tenth of train is cut off."""

    hub: str
    config: str | None = None
    train: str | None = "train"
    validation: str | None = None
    test: str = "test"
    label: str = "label"
    image: str | None = "image"
    text: str | None = None  # a template over the columns
    classes: Sequence[str] | Mapping[str, str] | None = None
    templates: Sequence[str] = ("{}",)
    size: tuple[int, int] = (0, 0)  # train and test examples, for the estimate

    @property
    def class_count(self) -> int:
        return len(self.classes) if self.classes is not None else 200


SATELLITE = ("a satellite picture of {}.", "{} seen from above.", "an aerial view that shows {}.")
SIGNS = ("a traffic sign: {}.", 'a close-up of the road sign "{}".', "a photo of a {} traffic sign.")
DIGITS = (
    'a house number with the digit "{}".',
    'the number "{}" on a street sign.',
    "a photo of the digit {}.",
)
TEXTURES = ("a {} texture.", "a photo of a {} surface.", "a {} pattern, close up.")
THINGS = ("a drawing of a {}.", "a rendition of a {}.", "a picture of a {}.", "an artwork with a {} in it.")

EUROSAT_CLASSES = (
    "fields of annual crops", "forest", "brushland or grassland", "a highway or a road", "industrial buildings",
    "pasture", "permanent crops such as orchards or vineyards", "residential buildings", "a river",
    "a sea or a lake",
)  # fmt: skip
GTSRB_CLASSES = (
    "speed limit 20", "speed limit 30", "speed limit 50", "speed limit 60", "speed limit 70", "speed limit 80",
    "end of speed limit 80", "speed limit 100", "speed limit 120", "no overtaking", "no overtaking for trucks",
    "right of way at the next crossing", "priority road", "yield", "stop", "no vehicles", "no trucks",
    "no entry", "general danger", "dangerous curve to the left", "dangerous curve to the right", "double curve",
    "bumpy road", "slippery road", "road narrows on the right", "road works", "traffic lights ahead",
    "pedestrian crossing", "children crossing", "bicycles crossing", "snow or ice", "wild animals crossing",
    "end of all restrictions", "turn right ahead", "turn left ahead", "straight ahead only",
    "straight ahead or right", "straight ahead or left", "keep right", "keep left", "roundabout",
    "end of no overtaking", "end of no overtaking for trucks",
)  # fmt: skip
RESISC45_CLASSES = (
    "an airplane", "an airport", "a baseball diamond", "a basketball court", "a beach", "a bridge", "chaparral",
    "a church", "circular farmland", "clouds", "a commercial area", "dense housing", "a desert", "a forest",
    "a freeway", "a golf course", "an athletics ground", "a harbour", "an industrial area", "a road crossing",
    "an island", "a lake", "a meadow", "housing of medium density", "a mobile home park", "a mountain",
    "an overpass", "a palace", "a parking lot", "a railway", "a railway station", "rectangular farmland",
    "a river", "a roundabout", "a runway", "sea ice", "a ship", "a snow-covered mountain", "sparse housing",
    "a stadium", "storage tanks", "a tennis court", "terraced fields", "a thermal power station", "a wetland",
)  # fmt: skip
DTD_CLASSES = (
    "banded", "blotchy", "braided", "bubbly", "bumpy", "chequered", "cobwebbed", "cracked", "crosshatched",
    "crystalline", "dotted", "fibrous", "flecked", "freckled", "frilly", "gauzy", "grid-like", "grooved",
    "honeycombed", "interlaced", "knitted", "lace-like", "lined", "marbled", "matted", "meshed", "paisley",
    "perforated", "pitted", "pleated", "polka-dotted", "porous", "potholed", "scaly", "smeared", "spiralled",
    "sprinkled", "stained", "stratified", "striped", "studded", "swirly", "veined", "waffled", "woven",
    "wrinkled", "zigzagged",
)  # fmt: skip

VISION: Mapping[str, Declared] = {
    "eurosat": Declared(hub="tanganke/eurosat", classes=EUROSAT_CLASSES, templates=SATELLITE, size=(21_600, 2_700)),
    "svhn": Declared(hub="ufldl-stanford/svhn", config="cropped_digits", classes=tuple("0123456789"), templates=DIGITS,
                     size=(73_257, 26_032)),
    "gtsrb": Declared(hub="tanganke/gtsrb", classes=GTSRB_CLASSES, templates=SIGNS, size=(26_640, 12_630)),
    "resisc45": Declared(hub="tanganke/resisc45", classes=RESISC45_CLASSES, templates=SATELLITE, size=(18_900, 6_300)),
    "dtd": Declared(hub="tanganke/dtd", classes=DTD_CLASSES, templates=TEXTURES, size=(3_760, 1_880)),
}  # fmt: skip
IMAGENET_R = Declared(
    hub="axiong/imagenet-r", train=None, label="class_name", templates=THINGS, size=(0, 30_000)
)

_PAIR = "Premise: {%s} Claim: {%s} Does the premise entail the claim, contradict it, or neither?"
_YES_NO = "Premise: {%s} Claim: {%s} Does the claim follow from the premise?"
_ENTAILMENT = ("entailment", "neutral", "contradiction")
TEXT: Mapping[str, Declared] = {
    "snli": Declared(hub="stanfordnlp/snli", validation="validation", image=None,
                     text=_PAIR % ("premise", "hypothesis"), classes=_ENTAILMENT, size=(549_367, 9_824)),
    "mnli": Declared(hub="nyu-mll/glue", config="mnli", test="validation_matched", image=None,
                     text=_PAIR % ("premise", "hypothesis"), classes=_ENTAILMENT, size=(392_702, 9_815)),
    "rte": Declared(hub="nyu-mll/glue", config="rte", test="validation", image=None,
                    text=_YES_NO % ("sentence1", "sentence2"), classes=("yes", "no"), size=(2_490, 277)),
    "qnli": Declared(hub="nyu-mll/glue", config="qnli", test="validation", image=None,
                     text="Question: {question} Sentence: {sentence} Does the sentence hold the answer?",
                     classes=("yes", "no"), size=(104_743, 5_463)),
    "scitail": Declared(hub="allenai/scitail", config="snli_format", validation="validation", label="gold_label",
                        image=None, text=_YES_NO % ("sentence1", "sentence2"),
                        classes={"entailment": "yes", "neutral": "no"}, size=(23_596, 2_126)),
}  # fmt: skip


def load(declared: Declared, local: Mapping[str, str]) -> Dataset:
    """Train, validation and test with our class names; a local folder may stand in for the hub.

    Training examples whose content is also in validation or test are dropped."""
    folder = local.get(_key(declared), local.get(declared.hub))
    raw = load_hub(folder) if folder is not None else load_hub(declared.hub, declared.config)
    splits = {"train": declared.train, "validation": declared.validation, "test": declared.test}
    wanted = {ours: _split(raw, theirs, declared) for ours, theirs in splits.items() if theirs is not None}
    data = load_data(
        wanted,
        label_column=declared.label,
        image_column=declared.image,
        text_template=declared.text,
        labels=_labels(declared, next(iter(wanted.values()))),
        drop_unlabelled=True,
        check_images=False,
    )
    if declared.train is None:
        return data
    parts = dict(data.splits)
    if "validation" not in parts:
        parts["train"], parts["validation"] = _cut(parts["train"])
    kept = without_overlap(parts["train"], parts["validation"], parts["test"])
    notes = [*data.notes]
    if len(kept) < len(parts["train"]):
        notes.append(
            f"{len(parts['train']) - len(kept)} training examples are also in validation or test; dropped."
        )
    parts["train"] = [parts["train"][index] for index in kept]
    return Dataset(parts, data.labels, declared.hub, tuple(notes))


def _key(declared: Declared) -> str:
    return f"{declared.hub}:{declared.config}" if declared.config else declared.hub


def _split(raw: Mapping[str, Any], name: str, declared: Declared) -> Any:
    if name not in raw:
        raise DataError(f"{declared.hub} has no split {name!r}; there are: {', '.join(raw)}.")
    return raw[name]


def _labels(declared: Declared, rows: Any) -> dict[str, list[str] | str]:
    """The label set by the hub's own names, with our prompts; a text task's label is its answer."""
    feature = (getattr(rows, "features", None) or {}).get(declared.label)
    if isinstance(declared.classes, Mapping):
        words = dict(declared.classes)
    elif declared.classes is None:
        words = {str(name): str(name).replace("_", " ") for name in sorted(set(rows[declared.label]))}
    else:
        names = list(getattr(feature, "names", None) or map(str, range(len(declared.classes))))
        if len(names) != len(declared.classes):
            raise DataError(
                f"{declared.hub} has {len(names)} classes, {len(declared.classes)} were declared. "
                "Is it another version of the dataset?"
            )
        words = dict(zip(names, declared.classes, strict=True))
    if declared.image is None:
        return dict(words.items())
    return {name: [t.replace("{}", word) for t in declared.templates] for name, word in words.items()}


def _cut(train: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """A tenth of the training split for choosing, at most 5000 examples, the same ones every time."""
    count = min(VALIDATION_MOST, max(1, round(VALIDATION_SHARE * len(train))))
    held = set(random.Random(0).sample(range(len(train)), count))
    return [row for index, row in enumerate(train) if index not in held], [
        train[index] for index in sorted(held)
    ]
