//! The folder of a run: checkpoints by tag, written aside, renamed, marked, pointed at, and removed when there are
//! enough newer ones. At every moment of a save the checkpoints before it are whole.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::checksum::sum;
use crate::error::{CheckpointError, Result};
use crate::files::{self, os};
use crate::index::Index;
use crate::marker::{COMPLETE, INDEX, Marker};
use crate::read::check_size;

const LATEST: &str = "latest";
/// A checkpoint that is being written.
const ASIDE: &str = ".saving-";
/// A checkpoint whose tag a newer one is taking.
const REPLACED: &str = ".replaced-";

/// What there is in a run folder under one tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its tag.
    pub tag: String,
    /// Its folder.
    pub path: PathBuf,
    /// Its number in the run, from 1; none if it is not complete.
    pub sequence: Option<u64>,
    /// Why it is not complete.
    pub problem: Option<String>,
}

/// Which checkpoint to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Its folder.
    pub path: PathBuf,
    /// What is worth telling: others that were skipped, and why.
    pub notes: Vec<String>,
}

/// How many checkpoints stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// The newest so many; none for all.
    pub last: Option<u64>,
    /// Besides, every one whose number in the run is a multiple of this.
    pub every: Option<u64>,
}

/// Makes an empty folder aside for a checkpoint. What earlier saves left behind when they were killed is removed first.
///
/// # Errors
/// [`CheckpointError::BadTag`]; [`CheckpointError::Storage`] if the folder cannot be written.
pub fn begin(run: &Path, tag: &str) -> Result<PathBuf> {
    check_tag(tag)?;
    fs::create_dir_all(run).map_err(os("make the folder", run))?;
    for (name, path) in entries(run)? {
        if name.starts_with(ASIDE) {
            files::remove_folder(&path)?;
        } else if let Some(tag) = name.strip_prefix(REPLACED) {
            recover(&path, &run.join(tag))?;
        }
    }
    let aside = run.join(format!("{ASIDE}{tag}"));
    fs::create_dir(&aside).map_err(os("make the folder", &aside))?;
    Ok(aside)
}

/// Where the checkpoint is while it is being written.
#[must_use]
pub fn aside(run: &Path, tag: &str) -> PathBuf {
    run.join(format!("{ASIDE}{tag}"))
}

/// Makes a checkpoint of what lies aside: checks the files' sizes, writes the index, renames, marks. One rank calls it,
/// when all files are written and synced.
///
/// # Errors
/// [`CheckpointError::BadIndex`], [`CheckpointError::Damaged`], [`CheckpointError::Storage`]. Earlier checkpoints are
/// whole in any case.
pub fn commit(run: &Path, tag: &str, mut index: Index) -> Result<PathBuf> {
    check_tag(tag)?;
    index.check()?;
    let (aside, path, old) = (aside(run, tag), run.join(tag), run.join(format!("{REPLACED}{tag}")));
    for file in &index.files {
        check_size(&aside, file)?;
    }
    index.sequence = 1 + list(run)?.iter().filter_map(|found| found.sequence).max().unwrap_or(0);
    let text = index.to_json()?;
    files::write_whole(&aside.join(INDEX), text.as_bytes())?;
    if path.exists() {
        files::remove_folder(&old)?;
        files::rename(&path, &old)?;
    }
    files::rename(&aside, &path)?;
    let (index_nbytes, index_sum) = (text.len() as u64, sum(text.as_bytes()));
    let marker = Marker { sequence: index.sequence, index_nbytes, index_sum };
    files::write_whole(&path.join(COMPLETE), marker.text().as_bytes())?;
    files::remove_folder(&old)?;
    Ok(path)
}

/// Removes what lies aside for a tag, after a save that failed.
///
/// # Errors
/// [`CheckpointError::Storage`].
pub fn abandon(run: &Path, tag: &str) -> Result<()> {
    files::remove_folder(&aside(run, tag))
}

/// Lets `latest` name this tag.
///
/// # Errors
/// [`CheckpointError::Storage`].
pub fn point_latest(run: &Path, tag: &str) -> Result<()> {
    files::write_whole(&run.join(LATEST), tag.as_bytes())
}

/// The tag in `latest`; none if there is no such file, or an empty one.
///
/// # Errors
/// [`CheckpointError::Storage`].
pub fn latest(run: &Path) -> Result<Option<String>> {
    let bytes = files::read_if_there(&run.join(LATEST))?;
    let tag = bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
    Ok(tag.filter(|tag| !tag.is_empty()))
}

/// All checkpoints of a run, complete or not, the oldest first; incomplete ones before the complete.
///
/// # Errors
/// [`CheckpointError::Storage`].
pub fn list(run: &Path) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for (name, path) in entries(run)? {
        if let Some(tag) = name.strip_prefix(ASIDE) {
            found.push(unfinished(tag, path, "saving it was cut off, or goes on"));
        } else if let Some(tag) = name.strip_prefix(REPLACED) {
            if !matches!(Marker::read(&run.join(tag)), Ok(Some(_))) {
                found.push(judge(tag, path));
            }
        } else if !name.starts_with('.') && path.is_dir() && looks_like_one(&path) {
            found.push(judge(&name, path));
        }
    }
    found.sort_by(|first, second| (first.sequence, &first.tag).cmp(&(second.sequence, &second.tag)));
    Ok(found)
}

/// The checkpoint that `place` means: itself, or, of a run folder, the one with this tag, or the one that `latest` names.
/// Where that one is missing or was never finished, the newest that is complete.
///
/// # Errors
/// [`CheckpointError::NoneComplete`], [`CheckpointError::Incomplete`] for a tag that was asked for,
/// [`CheckpointError::Damaged`].
pub fn choose(place: &Path, tag: Option<&str>) -> Result<Chosen> {
    if let Some(tag) = tag {
        check_tag(tag)?;
        return complete(place, tag).map(|path| Chosen { path, notes: Vec::new() });
    }
    if looks_like_one(place) {
        Marker::read(place)?.ok_or_else(|| CheckpointError::incomplete(place, "saving it was cut off"))?;
        return Ok(Chosen { path: place.to_owned(), notes: Vec::new() });
    }
    let all = list(place)?;
    let skipped: Vec<String> = all.iter().filter_map(|f| Some(format!("{} ({})", f.tag, f.problem.clone()?))).collect();
    let named = latest(place)?;
    let newest = all.iter().rev().find(|found| found.sequence.is_some());
    let Some(newest) = newest else {
        return Err(CheckpointError::NoneComplete { path: place.to_owned(), skipped });
    };
    let mut notes: Vec<String> = skipped.into_iter().map(|text| format!("skipped {text}")).collect();
    let found = all.iter().find(|found| Some(&found.tag) == named.as_ref() && found.sequence.is_some());
    match (named, found) {
        (None, _) => notes.push(format!("{LATEST:?} names no checkpoint; {} is the newest", newest.tag)),
        (Some(tag), None) => {
            notes.push(format!(
                "{LATEST:?} names {tag:?}, which is no complete checkpoint; {} is the newest",
                newest.tag
            ));
        }
        (Some(tag), Some(chosen)) if chosen.sequence < newest.sequence => {
            notes.push(format!("{LATEST:?} names {tag:?}; {} was saved after it", newest.tag));
        }
        _ => {}
    }
    Ok(Chosen { path: found.unwrap_or(newest).path.clone(), notes })
}

/// Removes complete checkpoints that nobody asked to keep, the oldest first; the newest always stays, and so does the
/// one that `latest` names. Gives their tags.
///
/// # Errors
/// [`CheckpointError::Storage`].
pub fn prune(run: &Path, keep: Keep) -> Result<Vec<String>> {
    let Some(last) = keep.last else { return Ok(Vec::new()) };
    let named = latest(run)?;
    let complete: Vec<Found> = list(run)?.into_iter().filter(|found| found.sequence.is_some()).collect();
    let num_old = complete.len().saturating_sub(usize::try_from(last.max(1)).unwrap_or(usize::MAX));
    let mut removed = Vec::new();
    for found in &complete[..num_old] {
        let sequence = found.sequence.unwrap_or(0);
        let is_kept = keep.every.is_some_and(|every| every > 0 && sequence.is_multiple_of(every));
        if is_kept || named.as_ref() == Some(&found.tag) {
            continue;
        }
        // Without its mark first: a removal that is cut off leaves no damaged checkpoint.
        let marker = found.path.join(COMPLETE);
        fs::remove_file(&marker).map_err(os("remove", &marker))?;
        files::sync_folder(&found.path)?;
        files::remove_folder(&found.path)?;
        removed.push(found.tag.clone());
    }
    Ok(removed)
}

/// The folder of a complete checkpoint with this tag.
fn complete(run: &Path, tag: &str) -> Result<PathBuf> {
    let all = list(run)?;
    if let Some(found) = all.iter().find(|found| found.tag == tag && found.sequence.is_some()) {
        return Ok(found.path.clone());
    }
    let path = run.join(tag);
    Marker::read(&path)?; // a damaged mark is told as such
    let known: Vec<&str> =
        all.iter().filter(|found| found.sequence.is_some()).map(|found| found.tag.as_str()).collect();
    let problem = all.iter().find(|found| found.tag == tag).and_then(|found| found.problem.clone());
    let reason = problem.unwrap_or_else(|| "there is no such folder".to_owned());
    Err(CheckpointError::incomplete(&path, format!("{reason}; complete ones there: {}", known.join(", "))))
}

/// A checkpoint was about to take the tag of another: that one comes back unless the new one is complete.
fn recover(old: &Path, path: &Path) -> Result<()> {
    if matches!(Marker::read(path), Ok(Some(_))) {
        return files::remove_folder(old);
    }
    files::remove_folder(path)?;
    files::rename(old, path)
}

fn judge(tag: &str, path: PathBuf) -> Found {
    match Marker::read(&path) {
        Ok(Some(marker)) => Found { tag: tag.to_owned(), path, sequence: Some(marker.sequence), problem: None },
        Ok(None) => unfinished(tag, path, "saving it was cut off"),
        Err(error) => unfinished(tag, path, &error.to_string()),
    }
}

fn unfinished(tag: &str, path: PathBuf, problem: &str) -> Found {
    Found { tag: tag.to_owned(), path, sequence: None, problem: Some(problem.to_owned()) }
}

fn looks_like_one(folder: &Path) -> bool {
    folder.join(INDEX).exists() || folder.join(COMPLETE).exists()
}

fn entries(run: &Path) -> Result<Vec<(String, PathBuf)>> {
    let read = match fs::read_dir(run) {
        Ok(read) => read,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(os("read the folder", run)(error).into()),
    };
    let mut found = Vec::new();
    for entry in read {
        let entry = entry.map_err(os("read the folder", run))?;
        found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
    }
    found.sort();
    Ok(found)
}

fn check_tag(tag: &str) -> Result<()> {
    let reason = match tag {
        "" => "it is empty",
        LATEST => "a file has this name",
        _ if tag.contains(['/', '\0']) => "it is the name of one folder, without a slash",
        _ if tag.starts_with('.') => "it begins with a dot",
        _ if tag.trim() != tag || tag.contains('\n') => "it begins or ends with a space, or has a line break",
        _ => return Ok(()),
    };
    Err(CheckpointError::BadTag { tag: tag.to_owned(), reason })
}
