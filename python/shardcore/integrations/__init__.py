"""Other people's formats and libraries."""

from shardcore.integrations.load import Loaded, load_safetensors
from shardcore.integrations.safetensors_file import SafetensorsFile, StoredTensor, open_safetensors

__all__ = ["Loaded", "SafetensorsFile", "StoredTensor", "load_safetensors", "open_safetensors"]
