"""The files that `fedme deploy init` writes for operators and sites to read and edit."""

EXPERIMENT = """\
# The experiment. The server and all sites have the same file: a site refuses a server whose experiment differs from its own.
name = "federation"
rounds = 10

[method]
name = "fedme"                # `fedme list methods` shows all methods

[data]                        # the format of a sample; the data itself stays at the sites
name = "sites"
shape = [1, 8, 8]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
scale = 0.0625                # raw values are multiplied by this
val = 0.2
test = 0.25

[models]                      # the catalogue: every site picks one in its site.toml
pool = ["mlr", "dnn-32"]

[train]
epochs = 2
batch = 20
lr = 0.1
"""

DEFENCE = """
[defence]                     # against single sites; docs/threat-model.md says what it costs and what it does not do
norm = 30.0                   # a model that moves further in a round is scaled back to this distance
guest = 10.0                  # FedMe: a guest whose validation loss is worse than the own model's by more is not trained
"""

FEDERATION = """\
# Settings of the server. Sites do not see this file.
host = {host:<22} # the address that sites connect to; the server's certificate is issued for it
port = {port:<22} # the only port that sites use; it forwards to Flower's fleet API and nothing else
listen = {listen:<20} # the address to listen on, if it differs from host; "0.0.0.0": all addresses of this machine
control_port = {control_port:<14} # of Flower's server, which only this machine can reach; 0: port + 1
insecure = {insecure:<18} # true: no encryption and no authentication
min_sites = {min_sites:<17} # a run starts when this many sites are connected
min_replies = {min_replies:<15} # a round counts when this many sites have replied
timeout = {timeout:<19} # seconds to wait for a site's reply before the round goes on without it
patience = {patience:<18} # seconds to wait for enough sites or replies before the run fails
"""

SITE = """\
# Settings of this site. Only this site sees this file. Paths are relative to it.
name = "{name}"
model = "mlr"                 # from the experiment's models.pool; if models stay private (fml, pfml), also "module:Network"
experiment = "experiment.toml"  # the experiment that this site agrees to
imports = false               # true: code that the experiment names (a method, networks) may be imported
state = "state"               # private state and models: back it up, and let nobody else read it
records = "records"           # audit log and privacy account, over all runs: back it up, too

[data]
file = "data.npz"             # arrays x and y; or a .csv, .tsv or .parquet file, or a folder of images
label = "y"                   # the array or column of the labels
# features = ["age", "dose"]  # columns of a table, in this order; default: all columns except the label
# rename = {{ yes = "1" }}      # labels in this site's data = labels of the federation

[guests]                      # which models of other sites this site accepts
accept = "all"                # or a list of architectures
# max_parameters = 100000

[lend]                        # which sites may receive this site's model as a guest
to = "all"                    # or a list of sites; []: no site
architectures = "all"         # or a list: models of other architectures never leave this site

[tell]                        # what this site tells about itself
samples = true                # false: also its scores stay here, and it counts as the median site

[privacy]                     # the limit of this site's privacy account, over all runs and servers
# epsilon = 8.0               # default: the epsilon of the experiment

[server]
address = "{address}"
certificate = "ca.crt"
key = "key"
insecure = {insecure}
"""

OPERATOR = """\
# A federation

1. Check `experiment.toml` and `federation.toml`. If you change `experiment.toml` later, send it to every site again.
2. Send each folder in `sites/` to its site over a channel you trust, because it contains the site's private key. Then delete
   your copy of `sites/NAME/key`, and keep `key.pub`.
3. Start `fedme deploy server .` and leave it running.
4. Start a run with `fedme deploy submit experiment.toml`. `fedme deploy status .` shows which sites are connected. The results
   are in `runs/`.

To add a site, run `fedme deploy init . --sites NAME`.

To remove a site, run `fedme deploy remove . NAME`. It does not undo what the site has contributed.

Keep `server/` private. Anyone who reaches the control port of Flower's server can start runs, and run code on this machine. The
port is open to this machine only, so give accounts on this machine only to people you trust. Sites connect to the other port.
"""

SITE_README = """\
# Site {name}

1. Install FedMe with `pip install 'fedme[flower]'`, in the same version as the operator's.
2. Read `experiment.toml`: it defines what is computed and what is shared. Then edit `site.toml`: set your data and your model,
   which models of other sites you accept, and which sites may receive yours.
3. Check your settings with `fedme deploy node site.toml --check`.
4. Start `fedme deploy node site.toml` and leave it running. It reconnects after every restart of the site or the server.

Your data never leaves your machine. `fedme deploy audit .` lists everything that was sent and received, and
`fedme deploy budget site.toml` what it cost of your privacy. When a run is done, your
model is in `state/runs/`. Keep `key`, `state/` and `records/` private. To end all this: `fedme deploy leave site.toml`.
"""
