//! Virtual environments below the target folder, into which pip installs pinned wheels once.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::output::Output;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::system::{self, Need};

/// A virtual environment for one purpose.
pub struct Venv {
    folder: PathBuf,
    wheels: &'static [&'static str],
    /// What is fetched, for the notice.
    what: &'static str,
}

impl Venv {
    /// The environment in the target folder's `name`. `wheels` are all that is installed, each with its version.
    pub fn new(paths: &Paths, name: &str, wheels: &'static [&'static str], what: &'static str) -> Venv {
        Venv { folder: paths.target.join(name), wheels, what }
    }

    /// The environment's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A program of the environment.
    pub fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// The stamp is written last, so an environment without it is unfinished or of other versions.
    fn stamp(&self) -> PathBuf {
        self.folder.join("pushgate-wheels.txt")
    }

    /// Whether all of the wheels have been installed.
    pub fn is_ready(&self) -> bool {
        fs::read_to_string(self.stamp()).is_ok_and(|stamp| stamp == self.wheels.join("\n"))
    }

    /// Installs the wheels, if they are not.
    pub fn make(&self, paths: &Paths, guard: Guard) -> Result<()> {
        if self.is_ready() {
            return Ok(());
        }
        if let Some(reason) = system::unmet(&[Need::Python]) {
            bail!("fetching {} {reason}", self.what);
        }
        let folder = &self.folder;
        fs::create_dir_all(folder.parent().expect("it is below the target folder"))?;
        // Two tasks at once would empty the folder under each other.
        let path = folder.with_extension("lock");
        let lock = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        while let Err(TryLockError::WouldBlock) = lock.try_lock() {
            if process::interrupted() || guard.is_over() {
                bail!("another task holds {}", path.display());
            }
            thread::sleep(Duration::from_millis(100));
        }
        if self.is_ready() {
            return Ok(());
        }
        // On stderr, because tasks that need this print a path alone to stdout.
        let notice = format!("Fetching {} into {} (once)\n", self.what, folder.display());
        Output::of_this_thread().write_error(notice.as_bytes());
        let mut make = process::command("python3", &paths.root);
        make.args(["-m", "venv", "--clear"]).arg(folder);
        process::run_quietly(make, guard)?;
        let mut install = process::command(self.program("python"), &paths.root);
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
        install.args(["--no-deps", "--only-binary", ":all:"]).args(self.wheels);
        process::run_quietly(install, guard)
            .with_context(|| format!("fetching {} needs the Python registry", self.what))?;
        fs::write(self.stamp(), self.wheels.join("\n"))?;
        Ok(())
    }
}
