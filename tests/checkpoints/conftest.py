"""What tests of models in buckets share."""

import json

import pytest

from tests.object_store import serve


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store, whose buckets `s3://` and `gs://` both mean."""
    with serve() as store:
        account = {"gcs_base_url": store.address, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        for name, value in {
            "SPEC_JAX_CACHE": str(tmp_path / "cache"),
            "AWS_ENDPOINT_URL": store.address,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            "TENSORSTORE_GCS_HTTP_URL": store.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }.items():
            monkeypatch.setenv(name, value)
        yield store
