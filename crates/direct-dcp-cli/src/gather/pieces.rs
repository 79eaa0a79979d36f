//! Going through a file and through the shards of its rows at once.

use direct_dcp::plan::TokenRun;
use std::iter::Peekable;

/// Walks the runs of a sharding along with a file that is read in chunks, and cuts those that
/// cross a chunk's end.
pub(super) struct Pieces<I: Iterator> {
    runs: Peekable<I>,
}

impl<I: Iterator<Item = TokenRun>> Pieces<I> {
    pub(super) fn new(runs: I) -> Self {
        Pieces {
            runs: runs.peekable(),
        }
    }

    /// The pieces that cover the `count` tokens from `token` on. Calls are in order of tokens.
    pub(super) fn within(&mut self, token: usize, count: usize) -> impl Iterator<Item = TokenRun> {
        let end = token + count;
        std::iter::from_fn(move || {
            let run = self.runs.peek_mut().filter(|run| run.token < end)?;
            let mut piece = *run;
            piece.len = run.len.min(end - run.token);
            if piece.len == run.len {
                self.runs.next();
            } else {
                run.token += piece.len;
                run.row += piece.len;
                run.len -= piece.len;
            }
            Some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Pieces;
    use direct_dcp::plan::Sharding;

    #[test]
    fn pieces_cover_every_token_once_however_it_is_read() {
        for chunk in 1..20 {
            let runs = || Sharding::new(3, 5).unwrap().runs(37);
            let whole: Vec<_> = Pieces::new(runs()).within(0, 37).collect();
            assert!(whole.iter().copied().eq(runs()));
            let mut pieces = Pieces::new(runs());
            let mut tokens = Vec::new();
            for start in (0..37).step_by(chunk) {
                for piece in pieces.within(start, chunk.min(37 - start)) {
                    assert!(piece.token >= start && piece.token + piece.len <= start + chunk);
                    tokens.extend(
                        (0..piece.len).map(|i| (piece.token + i, piece.rank, piece.row + i)),
                    );
                }
            }
            let expected = whole
                .iter()
                .flat_map(|run| (0..run.len).map(|i| (run.token + i, run.rank, run.row + i)));
            assert!(tokens.into_iter().eq(expected));
        }
    }
}
