"""The settings of Azure Data Lake Storage, Google Cloud Storage and HDFS, a part of the settings in `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class CloudSettings:
    """The settings of Azure Data Lake Storage, Google Cloud Storage and HDFS."""

    azure_account_key: str = setting(
        "",
        "Key of the Azure storage account of the warehouse. If it is empty, the server uses azure_client_id. If that "
        "is empty too, it uses Azure's environment variables, a workload identity or a managed identity.",
        secret=True,
    )
    azure_tenant_id: str = setting("", "Tenant of the application in azure_client_id.")
    azure_client_id: str = setting(
        "", "Client id of the application (service principal) as which the server accesses Azure storage."
    )
    azure_client_secret: str = setting("", "Client secret of the application in azure_client_id.", secret=True)
    azure_endpoint: str = setting(
        "",
        "URL of the account's Blob service. For an emulator, the path of the URL is the name of the account. If it is "
        "empty, the URL is https://<account>.blob.core.windows.net.",
        schemes=("http", "https"),
    )
    azure_client_access: str = setting(
        "none",
        "Credentials that clients receive for Azure: none (they use their own credentials), or sas (a user-delegation "
        "SAS for the folder of one table). For sas, the account needs a hierarchical namespace.",
        choices=("none", "sas"),
    )
    gcs_service_account_key: str = setting(
        "",
        "Key of a Google Cloud service account, as JSON. If it is empty, the server uses gcs_service_account_file. If "
        "that is empty too, it uses Google's application default credentials.",
        secret=True,
    )
    gcs_service_account_file: str = setting("", "JSON file with the key of a Google Cloud service account.")
    gcs_endpoint: str = setting(
        "",
        "URL of Google Cloud Storage. If it is empty, the URL is https://storage.googleapis.com.",
        schemes=("http", "https"),
    )
    gcs_client_access: str = setting(
        "none",
        "Credentials that clients receive for Google Cloud Storage: none (they use their own credentials), or token "
        "(an access token that is restricted to one table).",
        choices=("none", "token"),
    )
    hdfs_config_folder: str = setting(
        "",
        "Folder with Hadoop's files core-site.xml and hdfs-site.xml, which name the NameNodes of a nameservice. If it "
        "is empty, the server uses the variable HADOOP_CONF_DIR.",
    )
    s3_sts_role: str = setting(
        "",
        "ARN of the AWS role whose temporary keys clients receive if s3_client_access is sts: arn:aws:iam::…:role/….",
    )
    s3_sts_external_id: str = setting(
        "",
        "External id that the trust policy of s3_sts_role requires. If it is empty, the server sends none.",
        secret=True,
    )
    s3_sts_endpoint: str = setting(
        "",
        "URL of the STS service. If it is empty, the server uses the STS service of AWS in s3_region.",
        schemes=("http", "https"),
    )
    s3_backend: str = setting(
        "",
        "Cloud that stores the objects of s3:// locations, instead of an S3 store: gs://, or "
        "abfss://<account>.dfs.core.windows.net. A bucket of a location is then a bucket or a container of the cloud. "
        "Engines read the objects through the objects gateway.",
        schemes=("gs", "abfss"),
    )
    cloud_keys_s: int = setting(
        3600,
        "Longest lifetime in seconds of the SAS that clients receive (azure_client_access is sas), and of the AWS "
        "keys that they receive (s3_client_access is sts). A SAS is valid for at least half of it. AWS limits keys to "
        "3600 s if the server itself uses the keys of a role.",
        minimum=600,
        maximum=43_200,
    )
