import numba
import pytest
import torch

from elias.kernels import bag_sum, label_logits

PADDING = 3  # the number of labels


def test_a_padded_label_has_logit_zero_and_passes_no_gradient():
    embedding = torch.ones(1, 2, requires_grad=True)
    weight, bias = torch.ones(3, 2, requires_grad=True), torch.ones(3, requires_grad=True)

    logits = label_logits(embedding, weight, bias, torch.tensor([[1, PADDING, PADDING]]))
    logits.sum().backward()

    assert logits.tolist() == [[3.0, 0.0, 0.0]]
    assert embedding.grad.tolist() == [[1.0, 1.0]]
    assert bias.grad.to_dense().tolist() == [0.0, 1.0, 0.0]


def test_gradients_of_a_table_hold_each_touched_row_once():
    embedding = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    weight, bias = torch.zeros(5, 2, requires_grad=True), torch.zeros(5, requires_grad=True)

    label_logits(embedding, weight, bias, torch.tensor([[4, 1], [5, 4]])).sum().backward()

    assert weight.grad.is_sparse
    assert weight.grad._indices().tolist() == [[1, 4]]
    assert weight.grad._values().tolist() == [[1.0, 2.0], [11.0, 22.0]]
    assert bias.grad._values().tolist() == [1.0, 2.0]


def test_a_shortlist_of_padding_touches_no_row():
    weight, bias = torch.zeros(3, 2, requires_grad=True), torch.zeros(3, requires_grad=True)

    label_logits(torch.ones(1, 2), weight, bias, torch.tensor([[PADDING]])).sum().backward()

    assert weight.grad._nnz() == 0


def test_an_empty_bag_sums_to_zero():
    weight = torch.ones(3, 2, requires_grad=True)
    ids, offsets = torch.tensor([2, 2]), torch.tensor([0, 0, 2])

    bags = bag_sum(weight, ids, offsets, torch.tensor([0.5, 1.0]))
    bags.sum().backward()

    assert bags.tolist() == [[0.0, 0.0], [1.5, 1.5]]
    assert weight.grad.to_dense().tolist() == [[0.0, 0.0], [0.0, 0.0], [1.5, 1.5]]


@pytest.mark.parametrize("checked", [True, False])
def test_the_users_sparse_tensor_checks_are_kept(checked):
    weight, bias = torch.zeros(3, 2, requires_grad=True), torch.zeros(3, requires_grad=True)

    with torch.sparse.check_sparse_tensor_invariants(checked):
        label_logits(torch.ones(1, 2), weight, bias, torch.tensor([[1]])).sum().backward()
        still = torch.sparse.check_sparse_tensor_invariants.is_enabled()

    assert still is checked


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two cores")
def test_results_do_not_depend_on_the_number_of_threads():
    def run(threads):
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        embedding = torch.randn(50, 33, generator=generator, requires_grad=True)
        weight = torch.randn(20, 33, generator=generator, requires_grad=True)
        bias = torch.randn(20, generator=generator, requires_grad=True)
        labels = torch.randint(0, 21, (50, 7), generator=generator)
        logits = label_logits(embedding, weight, bias, labels)
        logits.square().sum().backward()
        numba.set_num_threads(before)
        return [logits.detach(), embedding.grad, weight.grad.to_dense(), bias.grad.to_dense()]

    assert all(torch.equal(one, two) for one, two in zip(run(1), run(2), strict=True))
