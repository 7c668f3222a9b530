"""The settings of Azure Data Lake Storage and Google Cloud Storage. They are a part of `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class CloudSettings:
    azure_account_key: str = setting(
        "",
        "Key of the Azure storage account of the warehouse. If it is empty, the server uses azure_client_id, "
        "or else Azure's environment variables, a workload identity or a managed identity.",
        secret=True,
    )
    azure_tenant_id: str = setting("", "Tenant of the application that azure_client_id names.")
    azure_client_id: str = setting("", "Application (service principal) with which the server uses Azure storage.")
    azure_client_secret: str = setting("", "Secret of azure_client_id.", secret=True)
    azure_endpoint: str = setting(
        "",
        "URL of the account's Blob service, with the account in its path for an emulator. Empty: "
        "https://<account>.blob.core.windows.net.",
        schemes=("http", "https"),
    )
    azure_client_access: str = setting(
        "none",
        "What clients receive for Azure: none (they use their own credentials), sas (a user-delegation SAS for the "
        "folder of one table; the account needs a hierarchical namespace).",
        choices=("none", "sas"),
    )
    gcs_service_account_key: str = setting(
        "",
        "Key of a service account of Google Cloud, as JSON. If it is empty, the server uses "
        "gcs_service_account_file, or else Google's application default credentials.",
        secret=True,
    )
    gcs_service_account_file: str = setting("", "File with the key of a service account of Google Cloud, as JSON.")
    gcs_endpoint: str = setting(
        "", "URL of Google Cloud Storage; empty: https://storage.googleapis.com.", schemes=("http", "https")
    )
    gcs_client_access: str = setting(
        "none",
        "What clients receive for Google Cloud Storage: none (they use their own credentials), token (an access token "
        "that is restricted to one table).",
        choices=("none", "token"),
    )
    s3_sts_role: str = setting(
        "", "ARN of the role whose temporary keys clients get with s3_client_access = sts: arn:aws:iam::…:role/…."
    )
    s3_sts_external_id: str = setting(
        "", "External id that the trust policy of s3_sts_role demands. Empty: the server sends none.", secret=True
    )
    s3_sts_endpoint: str = setting(
        "", "URL of the STS service; empty: that of AWS in s3_region.", schemes=("http", "https")
    )
    s3_backend: str = setting(
        "",
        "Cloud that has the objects of s3:// locations instead of an S3 store: gs://, or "
        "abfss://<account>.dfs.core.windows.net. A bucket is a bucket or a container of the cloud. Engines use the "
        "objects gateway.",
        schemes=("gs", "abfss"),
    )
    cloud_keys_s: int = setting(
        3600,
        "Longest lifetime in seconds of a SAS of azure_client_access = sas (the shortest is half of it), and of keys "
        "of s3_client_access = sts. AWS limits keys to 3600 s if the server itself has the keys of a role.",
        minimum=600,
        maximum=43_200,
    )
