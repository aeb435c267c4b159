"""What is measured, against what it must reach, and the least time the hardware allows for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of work: prompts of one length, run as one batch."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def counts_prompt(self) -> bool:
        """Whether prompt tokens per second are its number, and not output tokens."""
        return self.num_output_tokens == 1

    @property
    def num_counted_tokens(self) -> int:
        """Tokens that its rate counts."""
        per_request = self.num_prompt_tokens if self.counts_prompt else self.num_output_tokens
        return self.num_requests * per_request


CELLS = (
    Cell("1 x (128+128)", 1, 128, 128),
    Cell("8 x (128+128)", 8, 128, 128),
    Cell("32 x (128+128)", 32, 128, 128),
    Cell("prefill 2,048", 1, 2048, 1),
    Cell("1 x (3,500+128)", 1, 3500, 128),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """How many times faster than a peer we must be, cell by cell of CELLS.

    Attributes:
        peers: configurations of one peer; the better one of each cell counts.
    """

    title: str
    ours: str
    peers: tuple[str, ...]
    ratios: tuple[float, ...]


SMOLLM2_BARS = (
    Bar("vLLM + AMD PACE compiled, bf16", "kvloom-bf16", ("pace",), (1.9, 1.8, 1.5, 1.05, 1.35)),
    Bar(
        "OpenVINO GenAI, the same Q4_1 file",
        "kvloom-q4",
        ("openvino", "openvino-bf16"),
        (2.8, 2.4, 1.9, 1.3, 1.7),
    ),
    Bar("vLLM eager, bf16", "kvloom-bf16", ("vllm",), (2.1, 2.6, 2.7, 2.3, 2.6)),
    Bar("llama.cpp, the same Q4_1 file", "kvloom-q4", ("llama",), (3.2, 7.0, 7.3, 8.0, 6.0)),
)

# Cells without a bar have 0; nobody asked for prompts alone.
GEMMA3_BARS = (
    Bar("vLLM + AMD PACE compiled, bf16", "kvloom-bf16", ("pace",), (1.3, 1.6, 1.8, 0.0, 1.3)),
    Bar("llama.cpp, the same Q4_K_M file", "kvloom-q4", ("llama",), (1.5, 3.5, 4.0, 0.0, 0.0)),
)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model that engines are compared on: a GGUF file, a folder of its weights in bf16, the bars.

    File and folder are below the folder of models, unless they are absolute paths.
    """

    gguf: str
    folder: str
    bars: tuple[Bar, ...]

    @property
    def engines(self) -> list[str]:
        """Those the bars speak of: kvloom's first, then the peers."""
        names = [bar.ours for bar in self.bars] + [name for bar in self.bars for name in bar.peers]
        return list(dict.fromkeys(names))


MODELS = {
    "smollm2": BenchModel("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-hf", SMOLLM2_BARS),
    "gemma3": BenchModel("gemma-3-270m-q4_k_m.gguf", "gemma3-hf", GEMMA3_BARS),
}

# Of the limit: a bf16 cell of one request that reaches it has nothing left to gain.
ENOUGH_OF_LIMIT = 0.9


@dataclass(frozen=True, slots=True)
class OpsPerSecond:
    """Peaks of the machine's arithmetic."""

    bf16: float
    int8: float


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """Layers that see alike.

    Attributes:
        num_kv_values: keys and values of one token, over these layers.
        num_products: multiplications per query and key, over these layers and all heads: the
            score's and the weighted sum's.
        window: tokens that a query sees, itself included; None: all.
    """

    num_kv_values: int
    num_products: int
    window: int | None = None

    def num_seen(self, length: int) -> int:
        """Keys that the last of `length` tokens sees."""
        return length if self.window is None else min(length, self.window)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a forward pass computes and reads, in values.

    Attributes:
        num_body_weights: of all layers.
        num_head_weights: of the matrix that makes logits.
    """

    num_body_weights: int
    num_head_weights: int
    attention: tuple[AttentionSize, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """How an engine holds a model: bytes it must read, and the arithmetic it can use.

    Attributes:
        is_int8: whether weights are multiplied in 8 bits; attention is computed in bf16.
        is_head_int8: whether that holds for the head alone, as of one that is screened.
    """

    body_bytes: float
    head_bytes: float
    kv_value_bytes: float
    is_int8: bool
    is_head_int8: bool = False


def limit_seconds(
    cell: Cell, size: ModelSize, form: Format, read_bytes_per_s: float, peaks: OpsPerSecond
) -> float:
    """The least time for a cell: each part at the speed of memory or of arithmetic.

    Weights and KV are read once per step, a prompt is one step, and only the rows that are sampled
    need the head. What else an engine does is counted as nothing.
    """
    op_per_s = peaks.int8 if form.is_int8 else peaks.bf16
    head_op_per_s = peaks.int8 if form.is_int8 or form.is_head_int8 else peaks.bf16

    def part(num_bytes: float, num_ops: float, op_per_s: float) -> float:
        return max(num_bytes / read_bytes_per_s, num_ops / op_per_s)

    def weights(num_tokens: int) -> float:
        body = part(form.body_bytes, 2 * size.num_body_weights * num_tokens, op_per_s)
        head = part(form.head_bytes, 2 * size.num_head_weights * cell.num_requests, head_op_per_s)
        return body + head

    def attention(layers: AttentionSize, num_kv_read: int, num_pairs: int) -> float:
        """Of stored tokens that each request reads, and of its pairs of a query and a key."""
        num_bytes = num_kv_read * layers.num_kv_values * form.kv_value_bytes
        num_ops = 2 * layers.num_products * num_pairs
        return part(cell.num_requests * num_bytes, cell.num_requests * num_ops, peaks.bf16)

    prompt = cell.num_prompt_tokens
    last = prompt + cell.num_output_tokens - 1  # the last token is never read
    seconds = weights(cell.num_requests * prompt) + (last - prompt) * weights(cell.num_requests)
    for layers in size.attention:
        num_pairs = sum(map(layers.num_seen, range(1, prompt + 1)))
        seconds += attention(layers, prompt, num_pairs)
        for length in range(prompt + 1, last + 1):
            num_seen = layers.num_seen(length)
            seconds += attention(layers, num_seen, num_seen)
    return seconds
