"""What the process imports that others are forked from (see conftest).

It is all frozen: a collection in a child would write to, and so copy, every page that the parent shares."""

import gc

from gradfix._compat import heal_torchvision

heal_torchvision()

import pytest  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402, F401
import transformers.models.auto.tokenization_auto  # noqa: E402
import transformers.models.bert.modeling_bert  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.models.mixtral.modeling_mixtral  # noqa: E402
import transformers.models.t5.modeling_t5  # noqa: E402, F401

import gradfix.cli.commands  # noqa: E402
import gradfix.commands.compare  # noqa: E402
import gradfix.commands.evaluate  # noqa: E402
import gradfix.commands.finetune  # noqa: E402
import gradfix.commands.transport  # noqa: E402
import gradfix.votes.distributed.build  # noqa: E402, F401

gc.collect()
gc.freeze()
