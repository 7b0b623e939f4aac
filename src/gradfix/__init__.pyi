from gradfix._version import __version__ as __version__
from gradfix.align import ALIGNERS as ALIGNERS, Alignment as Alignment
from gradfix.checkpoints.open import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
from gradfix.checkpoints.write import verify as verify
from gradfix.data.load import load_data as load_data
from gradfix.errors import (
    CorruptInput as CorruptInput,
    DataError as DataError,
    GradfixError as GradfixError,
    IncompatibleCheckpoints as IncompatibleCheckpoints,
    Locked as Locked,
    OutputError as OutputError,
    UnsafeResult as UnsafeResult,
    UsageError as UsageError,
)
from gradfix.merging.folders import merge_checkpoints as merge_checkpoints
from gradfix.merging.memory import (
    MERGES as MERGES,
    consensus as consensus,
    mask_then_merge as mask_then_merge,
    merge as merge,
    merge_then_mask as merge_then_mask,
)
from gradfix.methods.comparison import compare as compare
from gradfix.methods.results import Results as Results
from gradfix.report.tracking import track as track
from gradfix.stream.checkpoint import transport_checkpoint as transport_checkpoint
from gradfix.tasks.base import TASKS as TASKS, Bound as Bound, Task as Task
from gradfix.tasks.scoring import evaluate as evaluate
from gradfix.training.best import Best as Best, best as best
from gradfix.training.finetuning import finetune as finetune
from gradfix.vectors.masks import MASKS as MASKS
from gradfix.vectors.scale import ScaleCurve as ScaleCurve, search_scale as search_scale
from gradfix.vectors.selection import SELECTORS as SELECTORS, select as select
from gradfix.vectors.signvotes import SignVotes as SignVotes
from gradfix.vectors.taskvector import TaskVector as TaskVector
from gradfix.vectors.transported import Transported as Transported, apply as apply, transport as transport
from gradfix.votes.collect import (
    ENGINES as ENGINES,
    collect_gradient as collect_gradient,
    collect_votes as collect_votes,
)
