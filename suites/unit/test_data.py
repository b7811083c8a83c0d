"""The integer generator: the same tokens everywhere, its statistics, its entropy floor, resuming and sharding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fp8stack.data import (
    DIALECTS,
    RING,
    DataError,
    SyntheticTokens,
    TokenFile,
    batches,
    key_of,
    permuted,
    random_bits,
    random_signs,
)

# Written down once; a difference means that every recorded curve is void (raise GENERATOR_VERSION with it).
GOLDEN_BITS = [750804632, 637436939, 2389374749, 1548596492, 2651283690, 4271745002]
GOLDEN_TOKENS = [[329, 631, 532, 315, 114, 572, 111, 386], [11, 588, 182, 412, 297, 11, 588, 135]]


def test_golden_bits() -> None:
    """The hash gives the recorded numbers, also past 2^32."""
    index = torch.tensor([0, 1, 2, 2**32 - 1, 2**32, 2**40 + 5])
    assert random_bits(7, "golden", index).tolist() == GOLDEN_BITS


def test_golden_tokens() -> None:
    """The first tokens of samples 0 and 1 of llama3-tiny's text."""
    batch = SyntheticTokens(vocab=768, seq=128, seed=0).samples(0, 2)
    assert batch.tokens[:, :8].tolist() == GOLDEN_TOKENS


def test_key_of_is_fnv1a() -> None:
    """Published vectors of 32-bit FNV-1a."""
    assert {text: key_of(text) for text in ("", "a", "foobar")} == {
        "": 0x811C9DC5,
        "a": 0xE40C292C,
        "foobar": 0xBF9CF968,
    }


def test_bits_are_even() -> None:
    """Each of the 32 bits is set in half of 2^17 numbers, neighbours are uncorrelated; four sigma each."""
    count = 1 << 17
    bits = random_bits(3, "statistics", torch.arange(count))
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**32
    sigma = 0.5 / math.sqrt(count)
    for bit in range(32):
        assert abs(float(((bits >> bit) & 1).double().mean()) - 0.5) < 4 * sigma, f"bit {bit}"
    pairs = torch.stack([bits[:-1], bits[1:]]).double()
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4 / math.sqrt(count)


def test_streams_differ() -> None:
    """Another seed or another name is another stream."""
    index = torch.arange(64)
    streams = [random_bits(seed, name, index) for seed in (0, 1) for name in ("a", "b")]
    for i, one in enumerate(streams):
        for other in streams[i + 1 :]:
            assert int((one == other).sum()) == 0


def test_signs() -> None:
    """Two different vectors of +1 and -1, nearly balanced; a piece of them is the same piece."""
    name, index = "layers.0.attention.wq.weight", torch.arange(4096)
    signs = random_signs(name, index)
    assert torch.equal(random_signs(name, index[100:200]), signs[:, 100:200])
    assert {-1, 1} == set(signs.unique().tolist())
    assert bool((signs.double().mean(dim=1).abs() < 4 / 64).all())
    assert abs(float((signs[0].double() * signs[1]).mean())) < 4 / 64


def test_labels_are_the_next_tokens() -> None:
    """labels[t] is tokens[t + 1], within the vocabulary."""
    batch = SyntheticTokens(vocab=768, seq=33, seed=5).samples(3, 4)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert tuple(batch.tokens.shape) == (4, 33)
    assert int(batch.tokens.min()) >= 0
    assert int(batch.labels.max()) < 768


def test_entropy_floor() -> None:
    """The offsets that the text uses have the frequencies whose entropy is the floor: 1.875 ln 2 nats."""
    text = SyntheticTokens(vocab=RING, seq=2000, seed=1)
    batch = text.samples(0, 40)
    ring = torch.empty(RING, dtype=torch.int64)
    ring[text._symbols] = torch.arange(RING)
    steps = (ring[batch.labels] - ring[batch.tokens]) % RING
    rank = {offset: place for dialect in DIALECTS for place, offset in enumerate(dialect)}
    counts = [0] * 5
    for row in steps.tolist():
        used = set(row)
        assert any(used <= set(dialect) for dialect in DIALECTS), "a sample keeps to one dialect"
        for step in row:
            counts[rank[step]] += 1
    total = sum(counts)
    for count, probability in zip(counts, (8 / 16, 4 / 16, 2 / 16, 1 / 16, 1 / 16), strict=True):
        sigma = math.sqrt(probability * (1 - probability) / total)
        assert abs(count / total - probability) < 4 * sigma
    entropy = -sum(count / total * math.log(count / total) for count in counts)
    assert entropy == pytest.approx(SyntheticTokens.entropy_floor_nats, abs=0.01)
    assert SyntheticTokens.entropy_floor_nats == pytest.approx(1.2997, abs=5e-5)


def test_dialects_share_no_offset() -> None:
    """Twenty different offsets, so that which dialect is spoken can be read from one step."""
    offsets = [offset for dialect in DIALECTS for offset in dialect]
    assert len(set(offsets)) == 20
    assert all(0 < offset < RING for offset in offsets)


def test_resume_and_shards() -> None:
    """A stream taken up at step 3, or dealt to two ranks, reads the samples of the straight run: no repeat, no gap."""
    text = SyntheticTokens(vocab=768, seq=16, seed=9)
    straight = torch.cat([text.batch(step, 4).tokens for step in range(5)])
    resumed = torch.cat([SyntheticTokens(vocab=768, seq=16, seed=9).batch(step, 4).tokens for step in (3, 4)])
    assert torch.equal(straight[12:], resumed)
    dealt = torch.cat([text.batch(step, 2, rank, 2).tokens for step in range(5) for rank in (0, 1)])
    assert torch.equal(straight, dealt)


@pytest.mark.parametrize(
    ("vocab", "seq", "word"),
    [
        pytest.param(100, 8, "vocabulary", id="data-small-vocabulary"),
        pytest.param(768, 0, "sequence", id="data-no-seq"),
    ],
)
def test_bad_sizes(vocab: int, seq: int, word: str) -> None:
    """A vocabulary below the ring and an empty sequence are refused by name."""
    with pytest.raises(ValueError, match=word):
        SyntheticTokens(vocab=vocab, seq=seq, seed=0)


def test_index_dtype() -> None:
    """Anything but int64 indices is refused: int32 would overflow silently."""
    with pytest.raises(ValueError, match="int64"):
        random_bits(0, "x", torch.arange(4, dtype=torch.int32))


@pytest.mark.parametrize("count", [pytest.param(n, id=f"permuted-{n}") for n in (1, 2, 3, 62, 1000, 4097)])
def test_permuted(count: int) -> None:
    """Every index once, in another order for another stream; an order of more than a few is not the identity."""
    index = torch.arange(count)
    one, other = permuted(index, count, 3, "a"), permuted(index, count, 3, "b")
    assert torch.equal(one.sort().values, index)
    assert torch.equal(other.sort().values, index)
    if count > 3:
        assert not torch.equal(one, index)
        assert not torch.equal(one, other)
    alone = [permuted(index[i : i + 1], count, 3, "a") for i in range(min(count, 9))]
    assert torch.equal(one[:9], torch.cat(alone))


def _file(folder: Path, dtype: str, tokens: int = 1001, vocab: int = 768) -> TokenFile:
    """A file whose token n is n: what a sample holds says where it comes from."""
    path = folder / f"{dtype}.bin"
    path.write_bytes(b"".join(n.to_bytes(int(dtype[4:]) // 8, "little") for n in range(tokens)))
    return TokenFile(str(path), dtype, vocab, seq=16, seed=1, batch=4)


@pytest.mark.parametrize("dtype", [pytest.param("uint16", id="uint16"), pytest.param("uint32", id="uint32")])
def test_token_file_epochs(dtype: str, tmp_path: Path) -> None:
    """62 windows of 16 that share one token: each once an epoch, in another order in the next; labels follow tokens."""
    text = _file(tmp_path, dtype, vocab=2000)
    assert text.count == 62
    epochs = []
    for epoch in range(2):
        batch = text.samples(62 * epoch, 62)
        assert torch.equal(batch.labels, batch.tokens + 1)
        epochs.append(batch.tokens[:, 0].tolist())
        assert sorted(epochs[-1]) == [16 * i for i in range(62)]
    assert epochs[0] != epochs[1]
    crossing = text.samples(60, 4).tokens[:, 0].tolist()
    assert crossing == epochs[0][60:] + epochs[1][:2]


@pytest.mark.parametrize("workers", [pytest.param(0, id="workers-0"), pytest.param(2, id="workers-2")])
def test_no_repeat_and_no_gap(workers: int, tmp_path: Path) -> None:
    """Two ranks, stopped after step 7 and resumed, read the samples of one straight run (torchtitan#279, #291)."""
    text = _file(tmp_path, "uint16", vocab=2000)
    straight = text.samples(0, 15 * 4).tokens[:, 0].tolist()
    read: list[list[int]] = []
    for rank in (0, 1):
        found = [b for part in (range(7), range(7, 15)) for b in batches(text, part, 2, rank, 2, workers)]
        read.append([int(n) for b in found for n in b.tokens[:, 0]])
    dealt = [n for step in range(15) for rank in (0, 1) for n in read[rank][2 * step : 2 * step + 2]]
    assert dealt == straight
    assert len(set(dealt)) == 60


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(None, "cannot be read.*--data", id="missing"),
        pytest.param(b"123", "3 bytes.*--data-dtype", id="cut"),
        pytest.param(bytes(64), "32 tokens, 1 samples of 16; expected at least one batch of 4", id="short"),
        pytest.param(b"", "0 tokens, 0 samples", id="empty"),
        pytest.param(bytes(500) + b"\xff\xff", "token id 65535.*vocabulary is 768", id="vocabulary"),
    ],
)
def test_bad_token_file(content: bytes | None, told: str, tmp_path: Path) -> None:
    """What cannot be trained on is one line before the first step."""
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=told):
        TokenFile(str(path), "uint16", vocab=768, seq=16, seed=0, batch=4)


def test_late_token_beyond_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id beyond the part that is scanned at the start is refused when its batch is read."""
    monkeypatch.setattr(TokenFile, "_SCANNED", 10)
    text = _file(tmp_path, "uint16", vocab=768)
    with pytest.raises(DataError, match="in a batch"):
        list(batches(text, range(15), 4, 0, 1, 0))
