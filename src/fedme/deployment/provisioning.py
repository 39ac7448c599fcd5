"""Create the files of a federation: an authority, the server's certificate, a key pair per site, and settings to edit.

Existing keys and settings are never changed, so the same command adds sites later.
"""

import datetime
import ipaddress
import json
import secrets
import shutil
import tomllib
from dataclasses import asdict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import write_text
from fedme.deployment.bundle import write_app
from fedme.deployment.operator_folder import NAME, NODES, Federation, Settings
from fedme.deployment.site_settings import agreed_task, read_experiment
from fedme.deployment.templates import DEFENCE, EXPERIMENT, FEDERATION, OPERATOR, SITE, SITE_README

YEARS = 3
LONGEST_NAME = 120


def write(folder: Path, experiment: Path | None, sites: list[str], settings: Settings) -> list[str]:
    """Write the files that do not exist yet, and return their names."""
    if repeated := sorted({name for name in sites if sites.count(name) > 1}):
        raise ConfigError(f"sites: {', '.join(repeated)} is given twice; every site needs a name of its own")
    if experiment is not None:
        agreed_task(read_experiment(experiment))  # rejects an experiment that cannot be deployed before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    existing = {path for path in folder.rglob("*") if path.is_file()}
    _write_new(folder / NAME, FEDERATION.format(**{key: json.dumps(value) for key, value in asdict(settings).items()}))
    federation = Federation.read(folder)
    _write_new(folder / "experiment.toml", _with_defence(experiment.read_text() if experiment is not None else EXPERIMENT))
    data = read_experiment(folder / "experiment.toml").dataset
    for name in (data.unlabeled_file, data.public_file):
        if experiment is not None and name is not None and not (folder / name).exists():
            _copy_if_present(experiment.parent / name, folder / name)
    _server(federation)
    for site in sites:
        _site(federation, site)
    _write_new(folder / "README.md", OPERATOR)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path not in existing)


def _with_defence(experiment: str) -> str:
    """The experiment with bounds on what a single site can do, unless it says itself."""
    return experiment if "defence" in tomllib.loads(experiment) else experiment.rstrip("\n") + "\n" + DEFENCE


def _write_new(path: Path, text: str) -> None:
    if not path.exists():
        path.write_text(text)


def _copy_if_present(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copy(source, target)


def _server(federation: Federation) -> None:
    server, settings = federation.server, federation.settings
    (server / "flwr").mkdir(parents=True, exist_ok=True)
    (server / NODES).mkdir(exist_ok=True)
    server.chmod(0o700)
    if not (server / "superexec.secret").exists():
        _secret(server / "superexec.secret", secrets.token_bytes(32))
    if not settings.insecure and not (server / "server.key").exists():
        _certificates(server, settings.host)
    federation.write_connection()
    write_app(server / "app")


def _site(federation: Federation, name: str) -> None:
    if not name or not all(character.isalnum() or character in "-_" for character in name):
        raise ConfigError(f"invalid site name '{name}'; use letters, digits, '-' and '_'")
    if len(name.encode()) > LONGEST_NAME:  # it is the name of a folder
        raise ConfigError(f"a site's name must have at most {LONGEST_NAME} bytes, got {len(name.encode())}: '{name}'")
    folder, settings = federation.folder / "sites" / name, federation.settings
    if folder.exists():
        return
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    if not settings.insecure:
        _key_pair(folder)
        shutil.copy(federation.server / "ca.crt", folder / "ca.crt")
    shutil.copy(federation.folder / "experiment.toml", folder / "experiment.toml")
    public = read_experiment(folder / "experiment.toml").dataset.public_file
    if public is not None:
        _copy_if_present(federation.folder / public, folder / public)
    text = SITE.format(name=name, address=federation.address, insecure=json.dumps(settings.insecure))
    (folder / "site.toml").write_text(text)
    (folder / "README.md").write_text(SITE_README.format(name=name))


def _key_pair(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _secret(folder / "key", key.private_bytes(*encoding))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "key.pub").write_bytes(public + b"\n")


def renew(federation: Federation) -> list[str]:
    """Issue both certificates again, for the same keys and three more years; returns the names of the files.

    Sites that trust the authority's certificate of before accept the server's new one until the former expires.
    """
    server = federation.server
    if federation.settings.insecure:
        raise ConfigError(f"{federation.folder}: an insecure federation has no certificates")
    keys = []
    for name in ("ca.key", "server.key"):
        if not (server / name).exists():
            raise ConfigError(f"{server / name}: no such file; restore it from a backup")
        keys.append(serialization.load_pem_private_key((server / name).read_bytes(), None))
    _issue(server, federation.settings.host, *keys)  # type: ignore[arg-type]
    copies = sorted(federation.folder.glob("sites/*/ca.crt"))
    for copy in copies:
        shutil.copy(server / "ca.crt", copy)
    return [str(path.relative_to(federation.folder)) for path in (server / "server.crt", server / "ca.crt", *copies)]


def _certificates(server: Path, host: str) -> None:
    """Create the federation's own authority, and a certificate for the server's address."""
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _secret(server / "ca.key", authority.private_bytes(*encoding))
    _secret(server / "server.key", key.private_bytes(*encoding))
    _issue(server, host, authority, key)


def _issue(server: Path, host: str, authority: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePrivateKey) -> None:
    """Write the certificates of the authority and of the server."""
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedMe federation")])
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
        False,
    )
    signing = x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **usage)
    serving = x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    key_id = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .add_extension(key_id, critical=False)
        .sign(authority, hashes.SHA256())
    )
    leaf = (
        _certificate(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedMe server")]), issuer, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(serving, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(dict.fromkeys(names))), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), critical=False)
        .sign(authority, hashes.SHA256())
    )
    write_text(server / "ca.crt", root.public_bytes(serialization.Encoding.PEM).decode())
    write_text(server / "server.crt", leaf.public_bytes(serialization.Encoding.PEM).decode())


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(content)
