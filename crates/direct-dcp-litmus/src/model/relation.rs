/// A binary relation over at most 128 events, one bit row per event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    rows: Vec<u128>,
}

impl Relation {
    /// The relation that relates none of `events` events.
    ///
    /// # Panics
    ///
    /// If there are more than 128 events.
    #[must_use]
    pub fn empty(events: usize) -> Self {
        assert!(
            events <= 128,
            "a row holds 128 events, this program has {events}"
        );
        Self {
            rows: vec![0; events],
        }
    }

    /// The pairs for which `related` holds, a pair of an event with itself left out.
    pub fn from_fn(events: usize, mut related: impl FnMut(usize, usize) -> bool) -> Self {
        let mut relation = Self::empty(events);
        for a in 0..events {
            for b in 0..events {
                if a != b && related(a, b) {
                    relation.insert(a, b);
                }
            }
        }
        relation
    }

    /// Adds the pair (a, b).
    pub fn insert(&mut self, a: usize, b: usize) {
        self.rows[a] |= 1 << b;
    }

    /// Whether (a, b) is in the relation.
    #[must_use]
    pub fn contains(&self, a: usize, b: usize) -> bool {
        self.rows[a] >> b & 1 == 1
    }

    /// Every pair, in order.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.rows.len()).flat_map(move |a| {
            (0..self.rows.len())
                .filter(move |&b| self.contains(a, b))
                .map(move |b| (a, b))
        })
    }

    /// The pairs in either relation.
    #[must_use]
    pub fn union(mut self, other: &Self) -> Self {
        for (row, more) in self.rows.iter_mut().zip(&other.rows) {
            *row |= more;
        }
        self
    }

    /// The pairs in both relations.
    #[must_use]
    pub fn intersection(mut self, other: &Self) -> Self {
        for (row, mask) in self.rows.iter_mut().zip(&other.rows) {
            *row &= mask;
        }
        self
    }

    /// (a, c) for every (a, b) here and (b, c) in `next`.
    #[must_use]
    pub fn then(&self, next: &Self) -> Self {
        let mut joined = Self::empty(self.rows.len());
        for (a, b) in self.pairs() {
            joined.rows[a] |= next.rows[b];
        }
        joined
    }

    /// The smallest transitive relation that contains this one.
    #[must_use]
    pub fn closure(mut self) -> Self {
        for via in 0..self.rows.len() {
            let reached = self.rows[via];
            for row in &mut self.rows {
                if *row >> via & 1 == 1 {
                    *row |= reached;
                }
            }
        }
        self
    }

    /// Whether no event is related to itself.
    #[must_use]
    pub fn is_irreflexive(&self) -> bool {
        (0..self.rows.len()).all(|a| !self.contains(a, a))
    }

    /// Whether following pairs never leads back to where one began.
    #[must_use]
    pub fn is_acyclic(&self) -> bool {
        self.clone().closure().is_irreflexive()
    }
}

#[cfg(test)]
mod tests {
    use super::Relation;

    #[test]
    fn a_closure_follows_chains_and_finds_cycles() {
        let mut r = Relation::empty(4);
        r.insert(0, 1);
        r.insert(1, 2);
        r.insert(2, 3);
        assert!(r.is_acyclic());
        assert_eq!(r.clone().closure().pairs().count(), 6);
        r.insert(3, 0);
        assert!(r.is_irreflexive() && !r.is_acyclic());
    }

    #[test]
    fn joining_relations_needs_a_middle() {
        let mut first = Relation::empty(3);
        first.insert(0, 1);
        let mut second = Relation::empty(3);
        second.insert(1, 2);
        assert_eq!(first.then(&second).pairs().collect::<Vec<_>>(), [(0, 2)]);
        assert_eq!(second.then(&first).pairs().count(), 0);
        assert_eq!(first.clone().union(&second).pairs().count(), 2);
        assert_eq!(first.intersection(&second).pairs().count(), 0);
    }
}
