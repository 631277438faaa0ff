"""The supported models: `MODEL_CLASSES` maps an architecture's name in config.json to its class.

A new family adds a module here, a line in this table and its name to `model_config.SUPPORTED_ARCHITECTURES`.
"""

from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.models.qwen2 import Qwen2ForCausalLM
from worker_proc.models.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
