"""The joint law: weights, copies, and the same candidate in two laws."""

from __future__ import annotations

import numpy as np

from dsbd_ort.decoding.joint_distribution import STAY
from tests.decoding.tables import joint_of


def test_probabilities_are_weight_times_token_probability():
    joint = joint_of([7, 8], np.log([0.3, 0.1]), [([2, 5], np.array([0.25, 0.75])), None])
    assert joint.tokens.tolist() == [2, 5, STAY] and joint.parents.tolist() == [0, 0, 1]
    np.testing.assert_allclose(joint.probabilities(), [0.1875, 0.5625, 0.25])


def test_copies_count_for_draws_but_not_for_the_weight_of_a_child():
    joint = joint_of([7, 8], np.log([0.2, 0.2]), [([1], np.array([1.0])), None], [3, 1])
    np.testing.assert_allclose(joint.probabilities(), [0.75, 0.25])
    np.testing.assert_allclose(joint.log_weights, np.log([0.2, 0.2]))


def test_a_candidate_is_the_same_in_both_laws_if_node_and_token_are():
    draft = joint_of([10, 11], np.log([0.5, 0.5]), [([3, 1], np.array([0.75, 0.25])), None])
    law = [1, 2, 3], np.array([0.1, 0.2, 0.7])
    target = joint_of([11, 10], np.log([0.2, 0.8]), [None, law])
    assert draft.aligned_to(target).tolist() == [2, 1, -1, 0]
    assert target.aligned_to(draft).tolist() == [3, 1, 0]
