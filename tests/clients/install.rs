//! Puts OpenAI's own clients below the target folder, once.
//!
//! Where a registry does not have them, or a machine lacks Python or Node, that is said and nothing is run.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PYTHON_CLIENT: &str = "openai==3.57.0";
const NODE_CLIENT: &str = "openai@6.49.0";

/// Runs a command to its end; `Err` with its last words where it fails or is not there.
fn run(program: &Path, args: &[&str], folder: &Path) -> Result<(), String> {
    let mut command = Command::new(program);
    let ended = command.args(args).current_dir(folder).stdin(Stdio::null()).output();
    let ended = ended.map_err(|why| format!("{}: {why}", program.display()))?;
    if ended.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&ended.stderr);
    Err(format!("{} {}: {}", program.display(), args.join(" "), words.lines().last().unwrap_or_default()))
}

/// A folder below the target folder in which `install` has put a client, now or before.
fn installed(name: &str, install: impl FnOnce(&Path) -> Result<(), String>) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name.replace(['=', '@'], "-"));
    let mark = folder.join("installed");
    if mark.exists() {
        return Some(folder);
    }
    // What an earlier attempt has left is of no use; an error means that there was none.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    match install(&folder) {
        Ok(()) => {
            fs::write(mark, name).unwrap();
            Some(folder)
        }
        Err(why) => {
            // Past the capture of the test's output: it is to be seen where all is green.
            let said = format!("NOT RUN: the client {name} can't be installed here: {why}\n");
            std::io::stderr().write_all(said.as_bytes()).unwrap();
            None
        }
    }
}

/// The folder of the Python client: `venv/bin/python` has it.
pub(crate) fn python() -> Option<PathBuf> {
    installed(&format!("python-{PYTHON_CLIENT}"), |folder| {
        run(Path::new("python3"), &["-m", "venv", "venv"], folder)?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", PYTHON_CLIENT];
        run(&folder.join("venv/bin/python"), &pip, folder)
    })
}

/// The folder of the Node client: `createRequire` of its `package.json` finds it.
pub(crate) fn node() -> Option<PathBuf> {
    installed(&format!("node-{NODE_CLIENT}"), |folder| {
        fs::write(folder.join("package.json"), "{}").map_err(|why| why.to_string())?;
        run(Path::new("npm"), &["install", "--silent", "--no-audit", "--no-fund", NODE_CLIENT], folder)
    })
}

/// A script of this folder.
pub(crate) fn script(name: &str) -> String {
    format!("{}/tests/clients/{name}", env!("CARGO_MANIFEST_DIR"))
}
