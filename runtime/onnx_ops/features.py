"""Classical features: columns, thresholds, counted n-grams and ensembles of decision trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

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


def _grams(
    pool: Integers, starts: Integers, shortest: int, longest: int
) -> Iterator[tuple[int, Integers]]:
    """The n-grams of the pool with their places in it.

    starts: where the n-grams of 1, 2, ... elements begin.
    """
    place = 0
    for i, start in enumerate(starts):
        size = i + 1
        end = starts[i + 1] if i + 1 < len(starts) else len(pool)
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
    """Counts of the pool's n-grams, weighted by `mode`.

    Up to `max_skip_count` elements may be skipped between the parts of an n-gram.
    """
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ValueError(f"unknown mode {mode!r}: valid are TF, IDF, TFIDF")
    rows = X.reshape(-1, X.shape[-1]) if X.dim() else X.reshape(1, 1)
    counts = torch.zeros(
        rows.shape[0], max(ngram_indexes) + 1, dtype=torch.float32, device=X.device
    )
    for place, gram in _grams(pool_int64s, ngram_counts, min_gram_length, max_gram_length):
        # The parts of an n-gram stand `step` elements apart; a single element needs no other step.
        for step in range(1, max_skip_count + 2 if len(gram) > 1 else 2):
            starts = rows.shape[1] - step * (len(gram) - 1)
            if starts > 0:
                parts = [
                    rows[:, k * step : k * step + starts] == item for k, item in enumerate(gram)
                ]
                counts[:, ngram_indexes[place]] += torch.stack(parts).all(0).sum(1)
    values = counts if mode != "IDF" else (counts > 0).to(counts.dtype)
    if weights is not None and mode != "TF":
        values = values * torch.tensor(weights, dtype=counts.dtype, device=X.device)
    return values if X.dim() == 2 else values.reshape(-1)


_COMPARISONS: tuple[Callable[[Tensor, float], Tensor], ...] = (
    torch.le,
    torch.lt,
    torch.ge,
    torch.gt,
    torch.eq,
    torch.ne,
)
# The modes 0 to 5 of a node are comparisons with its split; mode 6 is membership of its set.
_MEMBER = 6
_AVERAGE = 0
_AGGREGATES: Mapping[int, Callable[[Tensor, Tensor], Tensor]] = {
    _AVERAGE: torch.add,
    1: torch.add,
    2: torch.minimum,
    3: torch.maximum,
}


def _member_sets(values: Numbers) -> Iterator[Numbers]:
    """The sets that the membership nodes test, one after another: each ends with a NaN."""
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
    """Every leaf on a walk from the roots, and the samples that reach it.

    True branches are walked first: the membership nodes come in the order of their sets.
    """
    sets = _member_sets(members)
    true_ids, false_ids, true_leafs, false_leafs = (
        trees[name] for name in ("true_ids", "false_ids", "true_leafs", "false_leafs")
    )
    everywhere = torch.ones(X.shape[0], dtype=torch.bool, device=X.device)
    # A tree of a single leaf has a root whose two branches are that leaf.
    lone = [
        bool(true_leafs[root] and false_leafs[root] and true_ids[root] == false_ids[root])
        for root in roots
    ]
    walk = [
        (root, everywhere, leaf) for root, leaf in zip(reversed(roots), reversed(lone), strict=True)
    ]
    while walk:
        index, here, leaf = walk.pop()
        if leaf:
            yield index, here
            continue
        values = X[:, trees["features"][index]]
        mode = trees["modes"][index]
        if mode == _MEMBER:
            true = torch.isin(values, torch.tensor(next(sets), dtype=X.dtype, device=X.device))
        else:
            true = _COMPARISONS[mode](values, splits[index])
        if trees["missing"][index]:
            # Missing values are NaN, which no comparison holds for.
            true = true | values.isnan()
        walk.append((false_ids[index], here & ~true, bool(false_leafs[index])))
        walk.append((true_ids[index], here & true, bool(true_leafs[index])))


def _aggregate(
    X: Tensor,
    leaves: Iterable[tuple[int, float, Tensor]],
    targets: int,
    combine: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Combine the weights of leaves, each with its target and its samples, by target."""
    columns = [X.new_zeros(X.shape[0]) for _ in range(targets)]
    # A minimum or maximum starts from the first leaf, not from zero.
    reached = torch.zeros(X.shape[0], targets, dtype=torch.bool, device=X.device)
    for target, weight, samples in leaves:
        old = columns[target]
        new = torch.full_like(old, weight)
        combined = torch.where(reached[:, target], combine(old, new), new)
        columns[target] = torch.where(samples, combined, old)
        reached[:, target] |= samples
    return torch.stack(columns, dim=1)


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
    """The trees' results by sample and target; zero for a target without a leaf."""
    if post_transform:
        raise ValueError(
            f"the post_transform {post_transform} of a TreeEnsemble is not supported: only 0, none"
        )
    trees = {
        "features": nodes_featureids,
        "modes": nodes_modes,
        "true_ids": nodes_truenodeids,
        "false_ids": nodes_falsenodeids,
        "true_leafs": nodes_trueleafs,
        "false_leafs": nodes_falseleafs,
        "missing": nodes_missing_value_tracks_true or (0,) * len(nodes_modes),
    }
    leaves = _leaves(X, tree_roots, trees, nodes_splits, membership_values or ())
    weighted = ((leaf_targetids[leaf], leaf_weights[leaf], samples) for leaf, samples in leaves)
    y = _aggregate(X, weighted, n_targets, _AGGREGATES[aggregate_function])
    return y / len(tree_roots) if aggregate_function == _AVERAGE else y


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "TfIdfVectorizer": tf_idf,
    "ai.onnx.ml.ArrayFeatureExtractor": array_feature_extractor,
    "ai.onnx.ml.Binarizer": binarizer,
    "ai.onnx.ml.TreeEnsemble": tree_ensemble,
}
