#!/bin/sh
# What a fleet with one board needs, in the folder of this script: identities, the tutorial's data and model. `make board`
# runs it; further words are options of `shoal init`.
set -eu
cd "$(dirname "$0")"
rm -rf lab
shoal init lab --host 10.0.2.2 "$@" # what an emulated board calls the computer that it is emulated on
shoal enroll pi-1 --folder lab
cat rounds.toml >>lab/fleet.toml
python ../tutorial/make_data.py
shoal export --models ../tutorial/my_models.py --arch small_cnn --widths 1,0.5,0.25 --out lab/artifacts
sed -i 's/^arch = .*/arch = "small_cnn"/' lab/fleet.toml
