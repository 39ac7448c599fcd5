"""The files that `fedme deploy init` writes, for people to read and to fill in."""

EXPERIMENT = """\
# What the federation does. Every site has the same file: a site refuses a server whose experiment differs from its own.
name = "federation"
rounds = 10

[method]
name = "fedme"                # `fedme list methods`

[data]                        # what a sample looks like; the data itself stays at the sites
name = "sites"
shape = [1, 8, 8]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
scale = 0.0625                # raw numbers are multiplied by this
val = 0.2
test = 0.25

[models]                      # the catalogue: a site picks one in its site.toml
pool = ["mlr", "dnn-32"]

[train]
epochs = 2
batch = 20
lr = 0.1
"""

FEDERATION = """\
# The server's own settings. Sites do not see this file.
host = "{s.host}"        # the address that sites connect to; the certificate is for it
port = {s.port}                 # sites use this one only, and only Flower's fleet API is behind it
listen = "{s.listen}"              # where to listen for sites, if not at host: "0.0.0.0" is every address of this machine
control_port = {s.control_port}            # of Flower's server, always on this machine alone; 0: the one after port
insecure = {insecure}          # true: no encryption, no authentication
min_sites = {s.min_sites}             # a run begins when so many sites have said hello
min_replies = {s.min_replies}           # a round counts when so many have answered
timeout = {s.timeout}         # seconds until a site that does not answer is left out of the round
patience = {s.patience}       # seconds to wait for enough sites or replies before the run gives up
"""

SITE = """\
# This site's own settings. Nobody else sees this file. Paths are relative to it.
name = "{name}"
model = "mlr"                 # of the experiment's models.pool; private models (fml, pfml): also "module:Network"
experiment = "experiment.toml"    # what this site agreed to
state = "state"               # private state, models, audit log: keep it, and keep it to yourself

[data]
file = "data.npz"             # arrays x and y; or .csv, .tsv, .parquet, or a folder of images
label = "y"                   # the array or column of the labels
# features = ["age", "dose"]  # columns of a table, in this order; all but the label by default
# rename = {{ yes = "1" }}      # this site's word for a label = the federation's

[guests]                      # which models of others may come here
accept = "all"                # or a list of architectures
# max_parameters = 100000

[lend]                        # who may have this site's model as a guest
to = "all"                    # or a list of sites; [] is nobody

[server]
address = "{address}"
certificate = "ca.crt"
key = "key"
insecure = {insecure}
"""

OPERATOR = """\
# A federation

1. Look through `experiment.toml` and `federation.toml`. Whoever changes `experiment.toml` later sends it to every site again.
2. Give every folder of `sites/` to its site, over a channel you trust: it holds the site's private key. Then delete
   your copy of `sites/NAME/key`; keep `key.pub`.
3. `fedme deploy server .` and leave it running.
4. `fedme deploy submit experiment.toml`; `fedme deploy status .` says who is there; results are in `runs/`.

Keep `server/` to yourself. Whoever reaches the control port of Flower's server can run code on every site: it listens on this
machine alone, so trust whoever may log in here. Sites reach only the other one. More sites: `fedme deploy init . --sites NAME`.
"""

SITE_README = """\
# Site {name}

1. `pip install 'fedme[flower]'`, the version the operator has.
2. Read `experiment.toml`: it says what will be computed and what is shared. Fill in `site.toml`: your data, your model,
   and whom you trust with what.
3. `fedme deploy node site.toml` and leave it running. It comes back by itself after every restart of either side.

Your data never leaves. What was sent and received is in `state/audit.jsonl`; your model is in `state/runs/` when a run is done.
Keep `key` and `state/` to yourself.
"""

APP = """\
[project]
name = "fedme-run"
version = "1.0.0"
description = "Starts what is installed: this app holds no code"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedme"

[tool.flwr.app.components]
serverapp = "fedme.deployment.server_app:app"
clientapp = "fedme.deployment.site_app:app"

[tool.flwr.app.config]
run = ""
"""
