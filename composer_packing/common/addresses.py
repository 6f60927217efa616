"""How an address in an object store is told from a path on this machine."""

from urllib.parse import urlparse


def is_address(path: str) -> bool:
    """Whether a path is an address, such as `s3://bucket/folder` or `dbfs:/Volumes/folder`.

    The answer is that of Composer's `parse_uri`. A relative path whose first part holds a colon is therefore taken for
    an address; write it as `./a:b`.
    """
    return bool(urlparse(path.replace("AZURE_BLOBS", "azure")).scheme)  # a scheme holds no underscore
