//! Tuning tables: from files, to ranks, and into files.

use crate::error::{Error, plain};
use crate::ranks::Backend;
use crate::report;
use direct_dcp::Tuning;
use serde::{Deserialize, Serialize};
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A table, as it travels to a rank: its text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Table(pub(crate) Tuning);

impl TryFrom<String> for Table {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let table = text.parse::<Tuning>().map_err(|error| error.to_string())?;
        Ok(Table(table))
    }
}

impl From<Table> for String {
    fn from(table: Table) -> String {
        table.0.to_string()
    }
}

impl Table {
    /// Reads a file.
    pub(crate) fn load(path: &Path) -> Result<Self, Error> {
        let table = Tuning::load(path);
        Ok(Table(table.map_err(|error| error.to_string())?))
    }

    /// Reads the file that `ranks` ranks are to go by, if one is named, and says so if none of its
    /// entries can be for them.
    pub(crate) fn wanted(
        path: Option<&Path>,
        backend: Backend,
        ranks: usize,
    ) -> Result<Option<Self>, Error> {
        let Some(path) = path else {
            return Ok(None);
        };
        let table = Self::load(path)?;
        let mut settings = table.0.entries().iter().map(|entry| &entry.setting);
        if !settings.any(|one| (one.backend, one.ranks) == (backend.tuned(), ranks)) {
            let path = path.display();
            report::note(&format!(
                "tuning table {path} has no entry for {ranks} {backend}, whose ways are the default's"
            ));
        }
        Ok(Some(table))
    }
}

/// A file in the making, which appears whole or stays as it was. It is removed if dropped.
#[derive(Debug)]
pub(crate) struct Draft {
    path: PathBuf,
    file: NamedTempFile,
}

impl Draft {
    /// Checks that there can be a file at `path`.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let file = tempfile::Builder::new()
            .prefix(".direct-dcp-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(dir);
        let path = path.to_path_buf();
        match file {
            Ok(file) => Ok(Draft { path, file }),
            Err(error) => Err(failure(&path, &error)),
        }
    }

    /// Makes the file appear, with a table.
    pub(crate) fn finish(mut self, table: &Tuning) -> Result<(), Error> {
        let written = self.file.write_all(table.to_string().as_bytes());
        let written = written.and_then(|()| self.file.as_file().sync_all());
        written.map_err(|error| failure(&self.path, &error))?;
        let persisted = self.file.persist(&self.path);
        persisted.map_err(|error| failure(&self.path, &error.error))?;
        Ok(())
    }
}

fn failure(path: &Path, error: &io::Error) -> Error {
    Error::Failed(format!("tuning table {}: {}", path.display(), plain(error)))
}
