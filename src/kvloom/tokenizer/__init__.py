"""Text to token ids and back, with the model's own rules."""

from kvloom.tokenizer.chat import ChatOptions
from kvloom.tokenizer.loading import load_tokenizer
from kvloom.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatOptions", "Tokenizer", "load_tokenizer"]
