"""Everything that takes optimiser steps: fine-tuning, few-shot fine-tuning, lessons from a teacher."""
