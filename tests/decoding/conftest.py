"""The loops in which behaviour is tested: the one in numpy and, where it is built, that in C++."""

from collections.abc import Iterator

import pytest

from dsbd_ort.decoding import native_decoder, whole_requests


@pytest.fixture(params=["python", "native"], scope="module")
def both_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let ``decode`` and ``decode_iterations`` run in each loop; what the core does not know in
    numpy."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "native":
            if not native_decoder.is_installed():
                pytest.skip(native_decoder.NOT_INSTALLED)
            patch.setattr(whole_requests, "BatchedDecoder", native_decoder.EitherDecoder)
        yield
