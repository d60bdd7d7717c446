"""Classical features: columns, thresholds, counted n-grams and ensembles of decision trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

Tensor = torch.Tensor
Numbers = tuple[float, ...]
Integers = tuple[int, ...]


def array_feature_extractor(*, X: Tensor, Y: Tensor) -> Tensor:
    """The columns that `Y` names."""
    picked = X.index_select(-1, Y.reshape(-1).to(torch.int64))
    return picked.reshape(1, -1) if X.dim() == 1 else picked


def binarizer(*, X: Tensor, threshold: float = 0.0) -> Tensor:
    """One above the threshold, else zero."""
    return (threshold < X).to(X.dtype)


def _grams(pool: Integers, starts: Integers, shortest: int, longest: int) -> Iterator[tuple[int, Integers]]:
    """The n-grams of the pool with their places in it; `starts`: where n-grams of 1, 2, ... elements begin."""
    place = 0
    for i, start in enumerate(starts):
        size, end = i + 1, starts[i + 1] if i + 1 < len(starts) else len(pool)
        for first in range(start, end, size):
            if shortest <= size <= longest:
                yield place, pool[first : first + size]
            place += 1


def tf_idf(
    *,
    X: Tensor,
    mode: str,
    max_gram_length: int,
    min_gram_length: int,
    max_skip_count: int,
    ngram_counts: Integers,
    ngram_indexes: Integers,
    pool_int64s: Integers,
    weights: Numbers | None = None,
) -> Tensor:
    """Counts of the pool's n-grams, with up to `max_skip_count` skipped elements between parts, weighted by `mode`."""
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ValueError(f"unknown mode {mode!r}: valid are TF, IDF, TFIDF")
    rows = X.reshape(-1, X.shape[-1]) if X.dim() else X.reshape(1, 1)
    counts = torch.zeros(rows.shape[0], max(ngram_indexes) + 1, dtype=torch.float32, device=X.device)
    for place, gram in _grams(pool_int64s, ngram_counts, min_gram_length, max_gram_length):
        for step in range(1, max_skip_count + 2 if len(gram) > 1 else 2):
            starts = rows.shape[1] - step * (len(gram) - 1)
            if starts > 0:
                parts = [rows[:, k * step : k * step + starts] == item for k, item in enumerate(gram)]
                counts[:, ngram_indexes[place]] += torch.stack(parts).all(0).sum(1)
    found = counts if mode != "IDF" else (counts > 0).to(counts.dtype)
    if weights is not None and mode != "TF":
        found = found * torch.tensor(weights, dtype=counts.dtype, device=X.device)
    return found if X.dim() == 2 else found.reshape(-1)


_COMPARISONS: tuple[Callable[[Tensor, float], Tensor], ...] = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)
_MEMBER = 6
_AVERAGE = 0
_AGGREGATES: Mapping[int, Callable[[Tensor, Tensor], Tensor]] = {
    _AVERAGE: torch.add, 1: torch.add, 2: torch.minimum, 3: torch.maximum,
}  # fmt: skip


def _member_sets(values: Numbers) -> Iterator[Numbers]:
    """The sets that the membership nodes test: each ends with a NaN."""
    current: list[float] = []
    for value in values:
        if math.isnan(value):
            yield tuple(current)
            current = []
        else:
            current.append(value)


def _leaves(
    X: Tensor, roots: Integers, trees: Mapping[str, Integers], splits: Numbers, members: Numbers
) -> Iterator[tuple[int, Tensor]]:
    """Every leaf on a walk from the roots, and the samples that reach it; true branches first, in the sets' order."""
    sets = _member_sets(members)
    true_ids, false_ids, true_leafs, false_leafs = (trees[name] for name in ("true_ids", "false_ids", "true_leafs", "false_leafs"))
    everywhere = torch.ones(X.shape[0], dtype=torch.bool, device=X.device)
    lone = [bool(true_leafs[root] and false_leafs[root] and true_ids[root] == false_ids[root]) for root in roots]
    walk = [(root, everywhere, leaf) for root, leaf in zip(reversed(roots), reversed(lone), strict=True)]
    while walk:
        index, here, leaf = walk.pop()
        if leaf:
            yield index, here
            continue
        values, mode = X[:, trees["features"][index]], trees["modes"][index]
        if mode == _MEMBER:
            true = torch.isin(values, torch.tensor(next(sets), dtype=X.dtype, device=X.device))
        else:
            true = _COMPARISONS[mode](values, splits[index])
        if trees["missing"][index]:
            true = true | values.isnan()
        walk.append((false_ids[index], here & ~true, bool(false_leafs[index])))
        walk.append((true_ids[index], here & true, bool(true_leafs[index])))


def tree_ensemble(
    *,
    X: Tensor,
    nodes_splits: Numbers,
    nodes_featureids: Integers,
    nodes_modes: Integers,
    nodes_truenodeids: Integers,
    nodes_falsenodeids: Integers,
    nodes_trueleafs: Integers,
    nodes_falseleafs: Integers,
    leaf_targetids: Integers,
    leaf_weights: Numbers,
    tree_roots: Integers,
    n_targets: int,
    aggregate_function: int = 1,
    post_transform: int = 0,
    nodes_missing_value_tracks_true: Integers | None = None,
    membership_values: Numbers | None = None,
    nodes_hitrates: Numbers | None = None,
) -> Tensor:
    """The trees' results for every sample, aggregated by target; zero for a target without a leaf."""
    if post_transform:
        raise ValueError(f"the post_transform {post_transform} of a TreeEnsemble is not supported: only 0, none")
    trees = {
        "features": nodes_featureids, "modes": nodes_modes, "true_ids": nodes_truenodeids, "false_ids": nodes_falsenodeids,
        "true_leafs": nodes_trueleafs, "false_leafs": nodes_falseleafs,
        "missing": nodes_missing_value_tracks_true or (0,) * len(nodes_modes),
    }  # fmt: skip
    combine = _AGGREGATES[aggregate_function]
    columns: list[Tensor | None] = [None] * n_targets
    reached = torch.zeros(X.shape[0], n_targets, dtype=torch.bool, device=X.device)
    for leaf, here in _leaves(X, tree_roots, trees, nodes_splits, membership_values or ()):
        target = leaf_targetids[leaf]
        old = columns[target]
        old = X.new_zeros(X.shape[0]) if old is None else old
        weight = torch.full_like(old, leaf_weights[leaf])
        found = torch.where(reached[:, target], combine(old, weight), weight)
        columns[target] = torch.where(here, found, old)
        reached[:, target] |= here
    y = torch.stack([X.new_zeros(X.shape[0]) if column is None else column for column in columns], dim=1)
    return y / len(tree_roots) if aggregate_function == _AVERAGE else y


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "TfIdfVectorizer": tf_idf, "ai.onnx.ml.ArrayFeatureExtractor": array_feature_extractor, "ai.onnx.ml.Binarizer": binarizer,
    "ai.onnx.ml.TreeEnsemble": tree_ensemble,
}  # fmt: skip
