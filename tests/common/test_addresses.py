import pytest
from composer.utils import parse_uri

from composer_packing.common.addresses import is_address


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/runs/{run_name}", True),
        ("gs://bucket", True),
        ("azure://bucket/folder", True),
        ("AZURE_BLOBS://bucket/folder", True),
        ("dbfs:/Volumes/folder", True),
        ("a:b", True),
        ("./a:b", False),
        ("/runs/a:b", False),
        ("runs/{run_name}", False),
        ("runs", False),
        ("", False),
    ],
)
def test_what_composer_takes_for_an_address_is_one(path: str, expected: bool) -> None:
    assert is_address(path) is expected
    assert bool(parse_uri(path)[0]) is expected
